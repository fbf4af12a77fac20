"""Prompt datasets: the one place that knows how a task becomes a row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_tasks(path: str | Path, tasks: Sequence[dict[str, Any]]) -> None:
    """Write a prompt dataset as the trainer reads it: JSON lines with the task as JSON in column "label"."""
    rows = ({"input": "", "label": json.dumps(task), "datasource": task["env"]} for task in tasks)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_tasks(path: str | Path) -> list[dict[str, Any]]:
    """The tasks that `write_tasks` wrote. ValueError naming the row for anything else."""
    tasks = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            tasks.append(json.loads(json.loads(line)["label"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, row {number}: not a task ({type(error).__name__}: {error})") from error
    return tasks
