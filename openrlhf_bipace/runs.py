"""The run folder: where a run's configuration, metrics and rollouts live, and how to read them back.

``runs/<name>/`` holds config.json, metrics.jsonl (one line an iteration or an evaluation, flat names), rollouts/ and,
once `bipace-report` has run, report.md and learning_curve.png.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

STOPPED = 75  # exit code of a training that stopped at request, its checkpoint saved


class StopRequested(Exception):
    """Somebody made the run folder's `stop` file: training ended at a step boundary, after its checkpoint."""


METRICS = "metrics.jsonl"  # one line an iteration or an evaluation


class RunFolder:
    """One run's files. Creating the object touches nothing; `create` does."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def rollouts(self) -> Path:
        """Folder of the rollout dumps."""
        return self.path / "rollouts"

    def create(self) -> None:
        """Make the folder. Raises ValueError naming it when it cannot be written."""
        try:
            self.rollouts.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"--bipace.run_dir: got {str(self.path)!r} ({error.strerror}), allowed: a writable folder"
            ) from None

    def stop_requested(self) -> bool:
        """Whether the run folder holds a file `stop`."""
        return (self.path / "stop").exists()

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Store `values` as file `name`, replacing it as a whole."""
        target = self.path / name
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(values, indent=2, sort_keys=True, default=str) + "\n")
        partial.replace(target)

    def read_json(self, name: str) -> dict[str, Any]:
        """What `write_json` stored as `name`; empty if there is none."""
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else {}

    def write_config(self, config: dict[str, Any]) -> None:
        """Store what the run was started with."""
        self.write_json("config.json", config)

    def append_metrics(self, step: int, values: dict[str, Any]) -> None:
        """Append one line: `step` and every finite number of `values`."""
        numbers = {k: float(v) for k, v in sorted(values.items()) if isinstance(v, (int, float)) and math.isfinite(v)}
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")

    def rewind(self, step: int) -> None:
        """Forget what an earlier attempt wrote after iteration `step`: a resumed run will write it again."""
        file = self.path / METRICS
        if file.exists():
            kept = [
                line for line in file.read_text().splitlines() if line.strip() and json.loads(line)["step"] <= step
            ]
            partial = file.with_suffix(".partial")
            partial.write_text("".join(f"{line}\n" for line in kept))
            partial.replace(file)
        for dump in self.rollouts.glob("*_*.parquet"):
            if int(dump.stem.rpartition("_")[2]) > step:
                dump.unlink()

    def metrics(self) -> list[dict[str, float]]:
        """Every line of metrics.jsonl, in the order written. Raises ValueError if the run has none."""
        file = self.path / METRICS
        if not file.exists():
            raise ValueError(f"{self.path} is no run folder: {METRICS} is missing")
        return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]

    def config(self) -> dict[str, Any]:
        """What `write_config` stored; empty if there is none."""
        return self.read_json("config.json")
