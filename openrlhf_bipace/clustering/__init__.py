"""Group steps whose hidden states are near: `cluster` and the registry of its backends.

To add a backend: one file with a function ``(phi, groups, epsilon, centroid) -> (leader, stats)`` as `greedy.greedy`,
and one line in `BACKENDS`. Input checks, labels and sizes are made here, once for all backends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from openrlhf_bipace.clustering.approximate import find_flat, find_hnsw, find_ivf
from openrlhf_bipace.clustering.exact import find_exact
from openrlhf_bipace.clustering.greedy import greedy

__all__ = [
    "BACKENDS",
    "CENTROIDS",
    "BadVector",
    "Clusters",
    "backends",
    "check_vectors",
    "cluster",
    "from_leaders",
    "rows_by_group",
]

Backend = Callable[[torch.Tensor, list[np.ndarray], float, str], tuple[np.ndarray, dict[str, Any]]]
BACKENDS: dict[str, Backend] = {
    "reference": greedy,
    "exact": find_exact,
    "faiss-flat": find_flat,
    "faiss-ivf": find_ivf,
    "faiss-hnsw": find_hnsw,
}
CENTROIDS = ("mean", "seed")
SMALL = 128  # rows up to which the plain loop is faster on the CPU
_CHECK_ROWS = 2**16  # rows checked at a time


@dataclass(slots=True)
class Clusters:
    """A partition of N records into K clusters, each inside one group.

    Example: leaders 0, 0, 2 of three records give labels [0, 0, 1], sizes [2, 1], leader [0, 2].
    """

    labels: torch.Tensor  # [N] int64, 0 .. K-1 in the order in which the clusters were seeded
    sizes: torch.Tensor  # [K] int64
    leader: torch.Tensor  # [K] int64, the record that seeded each cluster
    stats: dict[str, Any] = field(default_factory=dict)  # backend and its figures, records, groups, clusters, seconds


class BadVector(ValueError):
    """A row that has no direction: `kind` is zero, NaN or infinite, `row` its number, `who` how messages call it."""

    def __init__(self, kind: str, row: int, who: str) -> None:
        super().__init__(kind, row, who)  # so that it travels between processes
        self.kind, self.row, self.who = kind, row, who

    def __str__(self) -> str:
        return f"phi: {self.kind} vector at {self.who}; a hidden state must be finite and not zero"


def backends() -> list[str]:
    """Names that `cluster(backend=...)` accepts."""
    return ["auto", *BACKENDS]


def cluster(
    phi: torch.Tensor | np.ndarray,
    group_ids: torch.Tensor | np.ndarray | Sequence[int],
    epsilon: float,
    *,
    centroid: str = "mean",
    backend: str = "auto",
    order: torch.Tensor | np.ndarray | Sequence[int] | None = None,
    names: Callable[[int], str] | Sequence[str] | None = None,
) -> Clusters:
    """Partition the records of each group by cosine distance, in one pass (spec section 6).

    A record joins the nearest centroid of its group if ``1 - cos <= epsilon + 1e-6``, else it seeds a cluster.
    Equally near centroids: the older cluster.

    Args:
        phi: [N, d] float16/bfloat16/float32/float64 vectors; they are normalised in float64.
        group_ids: [N] int; records of different groups never meet.
        epsilon: cosine distance in [0, 2].
        centroid: "mean" (renormalised running mean) or "seed" (first member).
        backend: "auto" or a name in `BACKENDS`. `reference` and `exact` give the same labels, as does `faiss-flat`;
            `faiss-ivf` and `faiss-hnsw` may miss the nearest centroid and say how often (`stats["same_leader"]`).
            Those of FAISS need seed centroids: a point in an index does not move.
        order: [N] int permutation, ``order[i]`` is the row visited i-th; None visits the rows as they are.
        names: describes a row in error messages, for instance ``"group g, trajectory 3, turn 5"``.

    Raises:
        ValueError: wrong shape, type, option or epsilon, or a zero, NaN or infinite vector.
    """
    start = time.perf_counter()
    phi, groups = _check_arrays(phi, group_ids)
    visit = _check_order(order, len(phi))
    _check_options(epsilon, centroid, backend)
    check_vectors(phi, names)
    rows = rows_by_group(groups, visit)
    chosen = choose(phi) if backend == "auto" else backend
    leader, figures = BACKENDS[chosen](phi, rows, float(epsilon), centroid)
    clusters = from_leaders(leader, visit)
    clusters.stats = {
        "backend": chosen,
        "records": len(phi),
        "groups": len(rows),
        "clusters": len(clusters.sizes),
        "seconds": time.perf_counter() - start,
        **figures,
    }
    return clusters


def choose(phi: torch.Tensor) -> str:
    """What `auto` means: a backend with exact labels, the faster one as measured (docs/clustering.md)."""
    return "reference" if len(phi) <= SMALL and not phi.is_cuda else "exact"


def rows_by_group(groups: np.ndarray, visit: np.ndarray) -> list[np.ndarray]:
    """Rows of every group in visiting order."""
    if not len(groups):
        return []
    by_group = visit[np.argsort(groups[visit], kind="stable")]
    return np.split(by_group, np.flatnonzero(np.diff(groups[by_group])) + 1)


def from_leaders(leader: np.ndarray, visit: np.ndarray) -> Clusters:
    """Number the clusters in seeding order."""
    seeds = visit[leader[visit] == visit]
    number = np.empty(len(leader), dtype=np.int64)
    number[seeds] = np.arange(len(seeds))
    labels = number[leader]
    sizes = np.bincount(labels, minlength=len(seeds))
    return Clusters(torch.from_numpy(labels), torch.from_numpy(sizes), torch.from_numpy(seeds))


def _check_arrays(phi: Any, group_ids: Any) -> tuple[torch.Tensor, np.ndarray]:
    phi = torch.as_tensor(phi).detach()
    if phi.ndim != 2 or not phi.is_floating_point():
        raise ValueError(f"phi: got shape {tuple(phi.shape)} of {phi.dtype}, expected [N, d] of a float type")
    groups = torch.as_tensor(group_ids).cpu().numpy()
    if groups.shape != (len(phi),):
        raise ValueError(f"group_ids: got shape {groups.shape}, expected ({len(phi)},), one per row of phi")
    if len(groups) and groups.dtype.kind not in "iu":
        raise ValueError(f"group_ids: got {groups.dtype}, expected integers")
    if len(phi) and not phi.shape[1]:
        raise ValueError("phi: got vectors of dimension 0")
    return phi, groups


def _check_order(order: Any, n: int) -> np.ndarray:
    if order is None:
        return np.arange(n)
    visit = torch.as_tensor(order).cpu().numpy()
    if visit.shape != (n,) or (n and visit.dtype.kind not in "iu") or not np.array_equal(np.sort(visit), np.arange(n)):
        raise ValueError(f"order: got {visit.dtype} of shape {visit.shape}, expected a permutation of 0 .. {n - 1}")
    return visit.astype(np.int64)


def _check_options(epsilon: float, centroid: str, backend: str) -> None:
    if isinstance(epsilon, str) or not math.isfinite(epsilon) or not 0.0 <= epsilon <= 2.0:
        raise ValueError(f"epsilon: got {epsilon!r}, expected a cosine distance in [0, 2] ('auto' is resolved before)")
    if centroid not in CENTROIDS:
        raise ValueError(f"centroid: got {centroid!r}, allowed: {' | '.join(CENTROIDS)}")
    if backend not in backends():
        raise ValueError(f"backend: got {backend!r}, allowed: {' | '.join(backends())}")
    if backend.startswith("faiss") and centroid != "seed":
        raise ValueError(f"backend: got {backend!r} with centroid {centroid!r}, allowed: centroid 'seed'")


def check_vectors(phi: torch.Tensor, names: Callable[[int], str] | Sequence[str] | None = None) -> None:
    """Raise `BadVector` for the first zero, NaN or infinite row: a few silently multiply, or merge, clusters."""
    for first in range(0, len(phi), _CHECK_ROWS):
        rows = phi[first : first + _CHECK_ROWS]
        largest = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))  # NaN where any entry is
        bad = torch.nonzero(~torch.isfinite(largest) | (largest == 0))
        if len(bad):
            i = int(bad[0])
            kind = "zero" if largest[i] == 0 else "NaN" if torch.isnan(largest[i]) else "infinite"
            row = first + i
            who = f"row {row}" if names is None else names(row) if callable(names) else names[row]
            raise BadVector(kind, row, who)
