"""Which row goes to which optimizer step, rank and micro-batch.

Trajectories have any number of turns, so rows rarely divide evenly. Nothing is duplicated or dropped: where a rank has
fewer rows than another, it gets rows that are masked from end to end (`PADDING`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

PADDING = -1  # in place of a row index: a fully masked row
MicroBatch = list[int]  # row indices


def optimizer_steps(
    trajectory_of_row: Sequence[int], trajectories: int, batch_size: int, rng: random.Random
) -> list[list[int]]:
    """Split the rows into optimizer steps of about `batch_size` trajectories, in random order, trajectories whole.

    Args:
        trajectory_of_row: [rows] the trajectory of each row.
        trajectories: how many were rolled out, those without rows included: they do not change the number of steps.
        batch_size: `--train.batch_size`; counts trajectories whatever the number of rows each has.
        rng: of the order.

    Returns row indices per step; every row is in exactly one step and no step is empty.
    """
    rows: dict[int, list[int]] = {}
    for row, trajectory in enumerate(trajectory_of_row):
        rows.setdefault(trajectory, []).append(row)
    order = list(rows)
    rng.shuffle(order)
    count = min(-(-trajectories // batch_size), len(order))
    bounds = [round(i * len(order) / count) for i in range(count + 1)]
    return [
        [row for trajectory in order[low:high] for row in rows[trajectory]]
        for low, high in zip(bounds, bounds[1:], strict=False)
    ]


def micro_batches(
    rows: Sequence[int],
    lengths: Sequence[int],
    ranks: int,
    size: int | None = None,
    max_tokens: int | None = None,
) -> list[list[MicroBatch]]:
    """Distribute the rows of one optimizer step: the same number of micro-batches for every rank.

    Args:
        rows: row indices.
        lengths: tokens of every row, indexed by row.
        ranks: data-parallel ranks.
        size: rows per micro-batch, or
        max_tokens: tokens per micro-batch (a longer row is alone), as `--train.dynamic_batch_enable` asks for.

    Returns micro-batches per rank; the ranks' tokens are balanced, and rows of like length share a micro-batch.
    """
    loads = [(0, rank) for rank in range(ranks)]
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):  # longest first onto the lightest rank
        load, rank = heapq.heappop(loads)
        mine[rank].append(row)
        heapq.heappush(loads, (load + lengths[row], rank))
    cut = [_cut(own, lengths, size, max_tokens) for own in mine]
    most = max(len(batches) for batches in cut)
    return [batches + [[PADDING]] * (most - len(batches)) for batches in cut]


def _cut(rows: list[int], lengths: Sequence[int], size: int | None, max_tokens: int | None) -> list[MicroBatch]:
    """Consecutive micro-batches of `rows`, whose lengths fall."""
    out: list[MicroBatch] = []
    for row in rows:
        # Padded or packed, a micro-batch costs at most its longest row, the first, times its number of rows.
        full = not out or (
            len(out[-1]) >= size if size is not None else lengths[out[-1][0]] * (len(out[-1]) + 1) > max_tokens
        )
        if full:
            out.append([])
        out[-1].append(row)
    return out
