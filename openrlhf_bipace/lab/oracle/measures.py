"""Every measure of docs/oracle.md, with a 95 % interval from the jackknife over resamples.

A resample is one batch of rollouts, the unit that is independent. Each measure is a smooth function of sums over
resamples, so leaving one out at a time gives its standard error, without a second random draw; the interval is that
times Student's quantile. Differences of two arms on the same resamples are paired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from openrlhf_bipace.lab.oracle.gradient import Directions

CLEAR = 0.1  # root mean squares of the truth: a turn whose true advantage is smaller has no sign to agree with


@dataclass(slots=True)
class Measure:
    """A value and what it would be without each resample."""

    value: float
    without: np.ndarray  # [R]

    @property
    def half_width(self) -> float:
        """Of the 95 % interval."""
        r = len(self.without)
        error = np.sqrt((r - 1) / r * ((self.without - self.without.mean()) ** 2).sum())
        return float(stats.t.ppf(0.975, r - 1) * error)

    def __sub__(self, other: Measure) -> Measure:
        return Measure(self.value - other.value, self.without - other.without)


def of_sums(
    function: Callable[[np.ndarray], np.ndarray], columns: np.ndarray, batch: np.ndarray, batches: int
) -> Measure:
    """`function` of the column sums of [N, k] `columns`; it maps [..., k] to [...]."""
    sums = np.stack([np.bincount(batch, column, batches) for column in columns.T], axis=1)
    total = sums.sum(axis=0)
    return Measure(float(function(total)), function(total - sums))


def accuracy(
    estimate: np.ndarray, truth: np.ndarray, cells: tuple[np.ndarray, np.ndarray], batch: np.ndarray, batches: int
) -> dict[str, Measure]:
    """Error of `estimate` [N] against `truth` [N], relative to the mean square of the truth (1: as bad as all zeros).

    mse = bias2 + variance; bias2 = the part that every action of a state shares + `bias2_action`.

    Args:
        cells: ([N], [N]) int, numbers of the row's (task, turn, state, action) and of its (task, turn, state).
    """
    used = _seen_twice(cells[0], batch, batches)
    error, a, b = (estimate - truth)[used], truth[used], batch[used]
    mse = of_sums(lambda s: s[..., 0] / s[..., 1], np.stack([error**2, a**2], 1), b, batches)
    scale = of_sums(lambda s: s[..., 1] / s[..., 0], np.stack([np.ones_like(a), a**2], 1), b, batches)
    bias, shared = (_over(_square_bias(error, cell[used], b, batches), scale) for cell in cells)
    mean = of_sums(lambda s: s[..., 1] / s[..., 0], np.stack([np.ones_like(a), error], 1), b, batches)
    return {
        "mse": mse,
        "bias2": bias,
        "bias2_action": bias - shared,
        "variance": mse - bias,
        "mean_error": mean,
    }


def agreement(estimate: np.ndarray, truth: np.ndarray, batch: np.ndarray, batches: int) -> dict[str, Measure]:
    """Pearson correlation, and over the turns with a clear true sign: equal signs (0 is wrong), and zeros."""
    x, y = estimate, truth
    moments = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], 1)
    clear = np.abs(y) > CLEAR * np.sqrt(np.mean(y * y))
    signs = np.stack([clear, clear & (np.sign(x) == np.sign(y)), clear & (x == 0)], 1).astype(float)
    return {
        "corr": of_sums(_pearson, moments, batch, batches),
        "sign": of_sums(lambda s: s[..., 1] / s[..., 0], signs, batch, batches),
        "silent": of_sums(lambda s: s[..., 2] / s[..., 0], signs, batch, batches),
    }


def cosines(found: Directions) -> dict[str, Measure]:
    """cos: of a batch with the exact gradient; pair: of two independent batches; limit: of the mean over batches.

    The first is limited by noise and bias, the second by noise alone, the third, free of noise in the limit of many
    batches, by bias alone. A batch without any gradient counts as cosine 0.
    """
    r, norm = len(found.along), np.sqrt(np.diag(found.gram).clip(min=0))
    inverse = np.divide(1.0, norm, out=np.zeros(r), where=norm > 0)
    cos = found.along * inverse / found.exact
    return {
        "cos": Measure(float(cos.mean()), (cos.sum() - cos) / (r - 1)),
        "pair": _off_diagonal(found.gram * np.outer(inverse, inverse)),
        "limit": _limit(found),
    }


def _limit(found: Directions) -> Measure:
    r, square, along = len(found.along), _off_diagonal(found.gram), found.along

    def cosine(mean_along, square):
        return np.where(square > 0, mean_along / (found.exact * np.sqrt(np.abs(square).clip(min=1e-300))), 0.0)

    without = cosine((along.sum() - along) / (r - 1), square.without)
    return Measure(float(cosine(along.mean(), np.float64(square.value))), without)


def _off_diagonal(matrix: np.ndarray) -> Measure:
    """Mean over pairs of different resamples of a symmetric [R, R] matrix."""
    r = len(matrix)
    rows = matrix.sum(axis=1) - np.diag(matrix)
    return Measure(rows.sum() / (r * (r - 1)), (rows.sum() - 2 * rows) / ((r - 1) * (r - 2)))


def _over(a: Measure, b: Measure) -> Measure:
    return Measure(a.value / b.value, a.without / b.without)


def _pearson(s: np.ndarray) -> np.ndarray:
    n, x, y, xx, yy, xy = np.moveaxis(s, -1, 0)
    spread = (n * xx - x * x).clip(min=0) * (n * yy - y * y).clip(min=0)
    return np.divide(n * xy - x * y, np.sqrt(spread), out=np.zeros_like(spread), where=spread > 0)


def _seen_twice(cell: np.ndarray, batch: np.ndarray, batches: int) -> np.ndarray:
    """[N] bool: the row's cell occurs in two resamples or more; of the others a bias cannot be told from noise."""
    pairs = np.unique(cell * batches + batch)
    return np.bincount(pairs // batches, minlength=int(cell.max()) + 1)[cell] > 1


def _square_bias(error: np.ndarray, cell: np.ndarray, batch: np.ndarray, batches: int) -> Measure:
    """Mean over rows of the squared expected error of their cell, without the noise of estimating it.

    With S_r the sum of the errors and n_r the visits of a cell in resample r, products of different resamples are
    unbiased: sum_{r != s} S_r S_s / sum_{r != s} n_r n_s estimates (E S / E n)^2.
    """
    pairs, index = np.unique(cell * batches + batch, return_inverse=True)
    c, r = np.unique(pairs // batches, return_inverse=True)[1], pairs % batches
    s, n = np.bincount(index, error), np.bincount(index).astype(float)
    sums = [np.bincount(c, x) for x in (s, s * s, n, n * n)]

    def part(t, q, m, mm):
        pairs = m * m - mm
        square = np.divide(t * t - q, pairs, out=np.zeros_like(t), where=pairs > 0.5)
        return m * square, np.where(pairs > 0.5, m, 0.0)

    top, bottom = part(*sums)
    left_top, left_bottom = part(*(x[c] - y for x, y in zip(sums, (s, s * s, n, n * n), strict=True)))
    tops = top.sum() + np.bincount(r, left_top - top[c], batches)
    bottoms = bottom.sum() + np.bincount(r, left_bottom - bottom[c], batches)
    return Measure(float(top.sum() / bottom.sum()), tops / bottoms)
