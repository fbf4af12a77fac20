"""Every rollout on disk: parquet, one row per turn, small enough to leave on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_bipace.records import Trajectory


def write_rollouts(
    path: Path, trajectories: Sequence[Trajectory], columns: dict[tuple[int, int], dict[str, Any]] | None = None
) -> None:
    """Write `trajectories` to `path`.

    Args:
        path: file to write; its folder must exist.
        trajectories: rollouts, failed ones included.
        columns: what the estimator knows about a turn, keyed by (index of the trajectory, index of the step): action
            key, return, cluster, branch, advantages. Turns without an entry hold nulls.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = columns or {}
    extra = sorted({name for values in columns.values() for name in values})
    rows = []
    for i, trajectory in enumerate(trajectories):
        for j, step in enumerate(trajectory.steps):
            known = columns.get((i, j), {})
            rows.append(
                {
                    "group": trajectory.group,
                    "sample": trajectory.sample,
                    "task": json.dumps(trajectory.task, sort_keys=True),
                    "end": trajectory.end.value,
                    "success": trajectory.success,
                    "error": trajectory.error,
                    "turn": step.turn,
                    "new_row": step.new_row,
                    "observation": step.observation,
                    "text": step.text,
                    "action": step.action,
                    "executed": step.executed,
                    "valid": step.valid,
                    "accepted": step.accepted,
                    "reward": step.reward,
                    "finish_reason": step.finish_reason,
                    "state_id": step.state_id,
                    "history_cut": step.history_cut,
                    "weights": step.weights,
                    "prompt_ids": step.prompt_ids,
                    "response_ids": step.response_ids,
                    **{name: known.get(name) for name in extra},
                }
            )
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The turns of one file written by `write_rollouts`, as dictionaries, in the order they were written."""
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()
