"""The float64 sequential reference: one record after another. It is the meaning of every other clusterer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SLACK = 1e-6  # added to epsilon, so that identical prompts never split by rounding
TIE = 1e-12  # two centroids whose distances differ by less are equally near: the older one wins
CANCELLED = 1e-9  # a sum of unit vectors shorter than this has no direction: its cosine to everything is 0


def greedy(
    phi: torch.Tensor, groups: list[np.ndarray], epsilon: float, centroid: str
) -> tuple[np.ndarray, dict[str, Any]]:
    """Assign each record to the nearest centroid within `epsilon`, else let it seed a cluster [paper].

    Args:
        phi: [N, d] float vectors, not necessarily normalised, already checked.
        groups: row numbers of each group, in the order in which they are visited.
        epsilon: largest cosine distance 1 - cos to a centroid.
        centroid: "seed" compares with a cluster's first member, "mean" with the mean of its members so far.

    Returns:
        leader [N] int64: for every row, the row that seeded its cluster. Figures for the log: none.
    """
    leader = np.empty(len(phi), dtype=np.int64)
    for rows in groups:
        x = unit_rows(phi, rows)
        sums, centroids = np.zeros_like(x), np.zeros_like(x)
        seeds: list[int] = []
        for row, vector in zip(rows, x, strict=True):
            k = len(seeds)
            if k:
                distance = 1.0 - centroids[:k] @ vector
                if distance.min() <= epsilon + SLACK:
                    c = int(np.argmax(distance <= distance.min() + TIE))
                    leader[row] = seeds[c]
                    if centroid == "mean":
                        sums[c] += vector
                        length = np.linalg.norm(sums[c])
                        centroids[c] = sums[c] / length if length > CANCELLED else 0.0
                    continue
            seeds.append(row)
            leader[row] = row
            sums[k] = centroids[k] = vector
    return leader, {}


def unit_rows(phi: torch.Tensor, rows: np.ndarray) -> np.ndarray:
    """The given rows of `phi` as float64 unit vectors [len(rows), d]; rows must be finite and not zero."""
    x = phi[torch.from_numpy(rows).to(phi.device)].double().cpu().numpy()
    x = x / np.abs(x).max(axis=1, keepdims=True)  # first, or squares of huge (tiny) values overflow (vanish)
    return x / np.linalg.norm(x, axis=1, keepdims=True)
