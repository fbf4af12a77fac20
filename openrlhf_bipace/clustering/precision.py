"""What float32 may decide and what it may not: error bounds, and the float64 judge of everything in between.

Notation: u = 2^-24, the unit roundoff of float32. Every bound is a worst case over all orders of summation, with or
without fused multiply-add, so it holds for any BLAS, block size, number of threads and device (TF32 excluded, see
`full_float32`).

Rows.       x = fl(v / |v|), the norm taken in float64, differs from the true unit vector by at most 2u plus float64
            dust; `ROW` = 4u.
Dots.       |fl(x . y) - x . y| <= g sum |x_k y_k| <= g |x| |y| with g = d u / (1 - d u) (Higham, Accuracy and Stability
            of Numerical Algorithms, 3.1), so a cosine of two rows is off by at most `pair_bound` = (d + 16) u.
Means.      `mean_bound` below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from openrlhf_bipace.clustering.greedy import CANCELLED, SLACK, TIE, unit_rows

U = 2.0**-24
DIGITS = 1e-10  # float64 dust and the tie window, far below every float32 bound
HOPELESS = 0.05  # a bound above this decides nothing: the judge sees every candidate
_JUDGE_ROWS = 256  # float64 rows made at a time


def pair_bound(d: int) -> float:
    """Largest error of a float32 cosine between two rows of dimension d made by `unit32`."""
    return 1.01 * (d + 16) * U + DIGITS


def mean_bound(d: int, block: int, updates: int, spread: float) -> float:
    """Largest error of <x, s> / |s| for a running sum s of unit rows, as `lockstep` maintains it in float32.

    Let a cluster have m members and `spread` >= m / |s| (1 if all are equal; at most 1 / (1 - epsilon)). Its stored sum
    has taken `updates` blocks of at most `block` rows each: every row adds its own error (4u) and the error of
    summing its block (block u), every block one rounding (u m), so |S - s| <= m (4 + block + updates) u. The dot with x
    adds d u m, the rows of the current block at most block u m more, each with its own dot. Hence D is off by at most
    m b with b = (d + 2 block + updates + 16) u. The squared norm is |S|^2 taken in float64 at the start of a block, then
    n += 2 D + 1 per member: off by at most 2 m b per member, 2 m^2 b in all, so the norm is off by m^2 b / |s|^2 relative
    to itself, on top of m b / |s| from S. Together: spread b + spread b + spread^2 b. 10 % covers second order terms as
    long as the result is under `HOPELESS`; above it the bound is infinite.
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
    x = phi.index_select(0, torch.from_numpy(rows).to(phi.device))
    if x.dtype != torch.float64:
        x = x.float()
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
        if not len(rows) or (float(norm.min()) > 1e-30 and float(norm.max()) < 1e30):
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
        """[M] distances of the row at `position` to the means of `clusters`, seeded at positions `first`, before it."""
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
