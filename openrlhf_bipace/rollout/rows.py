"""From trajectories to training rows: the only place that knows how turns share a row.

A row is a maximal run of turns of which only the first has `new_row`. Full context gives one row per trajectory,
window context one per turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from openrlhf_bipace.records import Trajectory


@dataclass(slots=True)
class Row:
    """One training sequence.

    Example: prompt ids [9, 4], response [7, 2], feedback [5], response [8] gives tokens [9, 4, 7, 2, 5, 8] and
    spans [(2, 4), (5, 6)].
    """

    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # response tokens of each turn, end-exclusive
    steps: list[int] = field(default_factory=list)  # index in `Trajectory.steps` of each span
    logprobs: list[float] | None = None  # per token of `tokens`, 0 where the policy did not sample


def rows_of(trajectory: Trajectory) -> list[Row]:
    """The training rows of `trajectory`, in time order; none if it has no turns."""
    rows: list[Row] = []
    for index, step in enumerate(trajectory.steps):
        if step.new_row:
            rows.append(Row(logprobs=None if step.logprobs is None else []))
        row = rows[-1]
        row.tokens += step.prompt_ids
        start = len(row.tokens)
        row.tokens += step.response_ids
        row.spans.append((start, len(row.tokens)))
        row.steps.append(index)
        if row.logprobs is not None:
            row.logprobs += [0.0] * len(step.prompt_ids) + step.logprobs
    return rows


def training_rows(trajectories: Sequence[Trajectory]) -> tuple[list[int], list[Row]]:
    """Index of the trajectory of each training row, and the rows; trajectories that do not count have none."""
    pairs = [(i, row) for i, t in enumerate(trajectories) if t.counts for row in rows_of(t)]
    return [i for i, _ in pairs], [row for _, row in pairs]


def locate(
    rows: Sequence[Row], owners: Sequence[int], sources: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int], list[int]]:
    """Where each turn's response lies: its row, first token and end (exclusive), one entry per source.

    Args:
        rows, owners: training rows and the trajectory of each.
        sources: (trajectory, index in its steps) of each turn.
    """
    place = {
        (owners[i], step): (i, *span)
        for i, row in enumerate(rows)
        for step, span in zip(row.steps, row.spans, strict=True)
    }
    row, start, end = zip(*(place[source] for source in sources), strict=True)
    return list(row), list(start), list(end)


def hidden_positions(row: Row, trajectory: Trajectory, position: str) -> list[int]:
    """Index in `row.tokens` at which each turn's hidden state is read, one per span.

    `prompt_end`: the last prompt token, whose logits give the first response token [paper]. `action_start`: the token
    before the action's body [ours].
    """
    offsets = [0] * len(row.spans)
    if position == "action_start":
        offsets = [trajectory.steps[i].action_start for i in row.steps]
    return [start + offset - 1 for (start, _), offset in zip(row.spans, offsets, strict=True)]
