"""What float32 may decide and what it may not: error bounds, and the float64 judge of everything in between.

u = 2^-24 is the unit roundoff of float32. Every bound is a worst case over all orders of summation, with or without
fused multiply-add, so it holds for any BLAS, block size, number of threads and device (TF32 is switched off).

Rows: x = fl(v / |v|), the norm taken in float64, is within 2 u of the true unit vector; 4 u is allowed for.
Dots: |fl(x . y) - x . y| <= d u / (1 - d u) |x| |y| (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
So a float32 cosine of two rows is off by at most (d + 16) u, `pair_bound`, up to terms of order u^2;
docs/clustering.md derives `mean_bound`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from openrlhf_bipace.clustering.greedy import CANCELLED, SLACK, TIE, unit_rows

U = 2.0**-24
DIGITS = 1e-10  # float64 dust and the tie window, far below every float32 bound
HOPELESS = 0.02  # a bound above this decides nothing: the judge sees every candidate
_JUDGE_ROWS = 256  # float64 rows made at a time
_UNIT_ROWS = 64  # float32 rows made at a time on the CPU


def pair_bound(d: int) -> float:
    """Largest error of a float32 cosine between two rows of dimension d made by `unit32`."""
    return 1.01 * (d + 16) * U + DIGITS


def mean_bound(d: int, block: int, updates: int, spread: float) -> float:
    """Largest error of <x, s> / |s| for a running sum s of unit rows, as `lockstep` keeps it in float32.

    Args:
        block: rows taken at a time.
        updates: roundings the sum has taken: one per block, or one per row where rows are added one by one.
        spread: members / |s|, at least 1; 1 / (1 - epsilon) or less while epsilon is below 1.

    The sum's rows, its additions, the dot with x and the additions inside a block put <x, s> off by at most
    members x b with b = (d + 2 block + updates + 16) u; the same error in |s|^2 adds up over the members, so |s| is
    off by at most spread^2 b relative to itself, and by spread b where it was last taken from the sum. A bound above
    `HOPELESS` counts as infinite; below it, 10 % cover the terms of second order.
    """
    b = (d + 2 * block + updates + 16) * U
    bound = 1.1 * b * (2 * spread + spread**2) + DIGITS
    return bound if bound < HOPELESS else float("inf")


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Matrix products in true float32, whatever the process allows elsewhere (TF32, bfloat16)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def unit32(phi: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """The given rows of `phi` as float32 unit vectors [len(rows), d] on its device, within 4u of the true ones."""
    index = torch.from_numpy(rows).to(phi.device)
    if phi.is_cuda or len(rows) <= _UNIT_ROWS:
        return _unit(phi.index_select(0, index))
    out = torch.empty(len(rows), phi.shape[1])
    for part, some in zip(out.split(_UNIT_ROWS), index.split(_UNIT_ROWS), strict=True):
        part.copy_(_unit(phi.index_select(0, some)))  # in pieces that stay in the processor's cache
    return out


def _unit(x: torch.Tensor) -> torch.Tensor:
    """May overwrite `x`."""
    if x.dtype != torch.float64:
        x = x.float()
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
        if not len(x) or (float(norm.min()) > 1e-30 and float(norm.max()) < 1e30):
            return x.div_(norm.float())
        x = x.double()
    x = x / x.abs().amax(dim=1, keepdim=True)
    return (x / torch.linalg.vector_norm(x, dim=1, keepdim=True)).float()


class Judge:
    """Decides in float64, with the reference's own arithmetic, what float32 must leave open."""

    def __init__(self, phi: torch.Tensor, epsilon: float) -> None:
        self.phi, self.limit = phi, epsilon + SLACK
        self.asked = 0  # cosines computed

    def near(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """[M] bool: are rows a_i and b_i of `phi` within epsilon?"""
        return self.distances(a, b) <= self.limit

    def distances(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """[M] float64 cosine distances of the rows a_i and b_i."""
        self.asked += len(a)
        out = np.empty(len(a))
        for s in range(0, len(a), _JUDGE_ROWS):
            part = slice(s, s + _JUDGE_ROWS)
            out[part] = 1.0 - np.einsum("ij,ij->i", unit_rows(self.phi, a[part]), unit_rows(self.phi, b[part]))
        return out

    def pick(self, distance: np.ndarray) -> int:
        """Position of the nearest of [M] candidates, oldest first, or -1 if none is within epsilon."""
        nearest = distance.min()
        return int(np.argmax(distance <= nearest + TIE)) if nearest <= self.limit else -1


class Sums:
    """Float64 sums of clusters, added up member by member as the reference does, only for clusters that are asked for.

    Args:
        rows: [n] rows of `phi` in visiting order.
        labels: [n] cluster of each visited row, filled in by the caller as it goes.
    """

    CACHE = 2**25  # float64 numbers kept (256 MB)

    def __init__(self, judge: Judge, rows: np.ndarray, labels: np.ndarray) -> None:
        self.judge, self.rows, self.labels = judge, rows, labels
        self._sums: dict[int, tuple[int, np.ndarray]] = {}

    def distances(self, position: int, clusters: np.ndarray, first: np.ndarray) -> np.ndarray:
        """[M] distances of the row at `position` to the means before it of `clusters`, seeded at positions `first`."""
        self.judge.asked += len(clusters)
        x = unit_rows(self.judge.phi, self.rows[position : position + 1])[0]
        if (len(self._sums) + len(clusters)) * len(x) > self.CACHE:
            self._sums.clear()
        return 1.0 - np.array([self._mean(int(c), int(f), position) @ x for c, f in zip(clusters, first, strict=True)])

    def _mean(self, cluster: int, first: int, position: int) -> np.ndarray:
        done, total = self._sums.get(cluster, (first, None))
        members = done + np.flatnonzero(self.labels[done:position] == cluster)
        for s in range(0, len(members), _JUDGE_ROWS):
            for x in unit_rows(self.judge.phi, self.rows[members[s : s + _JUDGE_ROWS]]):
                total = x.copy() if total is None else np.add(total, x, out=total)
        assert total is not None  # the seed is a member
        self._sums[cluster] = (position, total)
        length = np.linalg.norm(total)
        return total / length if length > CANCELLED else np.zeros_like(total)
