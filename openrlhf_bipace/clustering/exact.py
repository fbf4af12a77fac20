"""The `exact` backend: the reference's labels at the speed of float32 matrix products, on CPU or CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from openrlhf_bipace.clustering.lockstep import Lockstep
from openrlhf_bipace.clustering.precision import Judge, full_float32
from openrlhf_bipace.clustering.prefilter import Prefilter
from openrlhf_bipace.clustering.seeds import SeedBlocks

LARGE = 4096  # rows of a group from which it goes alone, and its seed centroids are resolved block by block
BLOCK_ALONE, BLOCK_TOGETHER = 256, 32  # rows taken at a time of one group, of each of several
SIDE_BY_SIDE, MEMORY = 48, 2**28  # groups in lockstep, and the float32 numbers their sums may take


def find_exact(
    phi: torch.Tensor, groups: list[np.ndarray], epsilon: float, centroid: str
) -> tuple[np.ndarray, dict[str, Any]]:
    """As `greedy.greedy`, label for label; `judged` counts the distances that float64 had to settle."""
    leader = np.empty(len(phi), dtype=np.int64)
    judge = Judge(phi, epsilon)
    with full_float32():
        if centroid == "seed":
            for rows in groups:
                if len(rows) >= LARGE:
                    blocks = SeedBlocks if phi.is_cuda else Prefilter
                    leader[rows] = rows[blocks(phi, rows, judge).run()]
            groups = [rows for rows in groups if len(rows) < LARGE]
        for batch in batches(groups, phi.shape[1]):
            block = BLOCK_ALONE if len(batch) == 1 else BLOCK_TOGETHER
            found = Lockstep(phi, batch, judge, centroid == "mean", block).run()
            for rows, leaders in zip(batch, found, strict=True):
                leader[rows] = leaders
    return leader, {"judged": judge.asked}


def batches(groups: list[np.ndarray], d: int) -> Iterator[list[np.ndarray]]:
    """Groups to go in lockstep, longest first."""
    groups = sorted(groups, key=len, reverse=True)
    while groups:
        longest = len(groups[0])
        count = 1 if longest >= LARGE else max(1, min(SIDE_BY_SIDE, MEMORY // (longest * d)))
        yield groups[:count]
        groups = groups[count:]
