"""Statistics over seeds, as Agarwal et al. (arXiv 2108.13264, "rliable") advise: intervals, not single numbers.

Intervals are percentile bootstraps (`scipy.stats.bootstrap`), stratified by warm start: seeds are resampled within
each warm start, so an interval says how the result would vary over training seeds from these warm starts, not over
warm starts. Where a warm start has a single seed, seeds are resampled across warm starts instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 5000
LEVEL = 0.95
THRESHOLDS = (0.5, 0.7)  # held-out success

Scores = dict[int, float]  # seed -> score


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean(scores: Scores, strata: Callable[[int], int]) -> Interval:
    """Mean score over the seeds."""
    return _bootstrap(_parts(scores, strata), lambda parts: _joined(parts).mean(axis=-1))


def interquartile_mean(scores: Scores, strata: Callable[[int], int]) -> Interval:
    """Mean of the middle half of the scores: robust to one lucky or collapsed seed."""
    return _bootstrap(_parts(scores, strata), lambda parts: stats.trim_mean(_joined(parts), 0.25, axis=-1))


def paired_difference(a: Scores, b: Scores, strata: Callable[[int], int]) -> Interval:
    """Mean over the common seeds of a - b: same warm start, same prompts, same draws. ValueError without any."""
    both = sorted(a.keys() & b.keys())
    if not both:
        raise ValueError("paired difference: the two arms have no seed in common")
    return mean({seed: a[seed] - b[seed] for seed in both}, strata)


def probability_of_improvement(a: Scores, b: Scores, strata: Callable[[int], int]) -> Interval:
    """P(a run of `a` beats a run of `b` from the same warm start), ties half; averaged over warm starts."""
    first, second = _parts(a, strata), _parts(b, strata)
    if len(first) != len(second):
        raise ValueError("probability of improvement: the two arms were not run from the same warm starts")
    count = len(first)

    def share(parts: Sequence[np.ndarray]) -> np.ndarray:
        wins = []
        for x, y in zip(parts[:count], parts[count:], strict=True):
            gap = x[..., :, None] - y[..., None, :]
            wins.append(((gap > 0) + 0.5 * (gap == 0)).mean(axis=(-2, -1)))
        return np.mean(wins, axis=0)

    return _bootstrap([*first, *second], share)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of a family of p-values."""
    order, out, worst = np.argsort(p_values), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        worst = max(worst, min(1.0, p_values[index] * (len(p_values) - rank)))
        out[index] = worst
    return out


def sign_flip_p(a: Scores, b: Scores) -> float:
    """Two-sided p-value of "no difference" by flipping the signs of the paired differences (scipy's exact test)."""
    gaps = np.array([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
    if len(gaps) < 2:
        return 1.0
    found = stats.permutation_test(
        (gaps,), lambda x, axis: np.mean(x, axis=axis), permutation_type="samples", vectorized=True, n_resamples=20_000
    )
    return float(found.pvalue)


def _parts(scores: Scores, strata: Callable[[int], int]) -> list[np.ndarray]:
    """Scores by warm start; in one part where a warm start has a single seed, and so none to resample."""
    groups: dict[int, list[float]] = {}
    for seed in sorted(scores):
        groups.setdefault(strata(seed), []).append(scores[seed])
    if any(len(group) < 2 for group in groups.values()):
        groups = {0: [scores[seed] for seed in sorted(scores)]}
    return [np.array(groups[key]) for key in sorted(groups)]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, axis=-1)


def _bootstrap(parts: list[np.ndarray], statistic: Callable[[Sequence[np.ndarray]], np.ndarray]) -> Interval:
    value = float(statistic(parts))
    if any(len(part) < 2 for part in parts):
        return Interval(value, np.nan, np.nan)  # nothing to resample
    if all(np.ptp(part) == 0 for part in parts):
        return Interval(value, value, value)
    found = stats.bootstrap(
        parts,
        lambda *drawn, axis: statistic(drawn),
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high))
