"""Success with its interval, turns and invalid actions, per kind of task and over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from openrlhf_bipace.evaluation.log import Result

OVERALL = "all tasks"
LEVEL = 0.95
_RESAMPLES = 9999


@dataclass(slots=True)
class Figures:
    """What a set of episodes says. Failed episodes are counted and left out of everything else."""

    episodes: int  # sound ones
    failed: int
    tasks: int  # different tasks among the sound ones
    success: float  # share of the episodes, as all below
    low: float  # 95 % interval of the success
    high: float
    score: float | None  # mean, an episode that did not end counting 0; None where the environment does not grade
    reward: float  # mean per episode
    turns: float  # mean per episode
    invalid: float  # share of the turns whose response did not parse or whose action was refused
    unparsed: float  # share of the turns whose response did not parse


def figures(results: Sequence[Result]) -> Figures | None:
    """Figures of `results`; None if no episode is sound."""
    sound = [r for r in results if not r.failed]
    if not sound:
        return None
    outcomes: dict[int, list[bool]] = {}
    for r in sound:
        outcomes.setdefault(r.task, []).append(r.success)
    low, high = interval(list(outcomes.values()))
    turns = sum(r.turns for r in sound)
    unparsed = sum(r.unparsed for r in sound)
    return Figures(
        episodes=len(sound),
        failed=len(results) - len(sound),
        tasks=len(outcomes),
        success=sum(r.success for r in sound) / len(sound),
        low=low,
        high=high,
        score=sum(r.score or 0.0 for r in sound) / len(sound) if any(r.score is not None for r in sound) else None,
        reward=sum(r.reward for r in sound) / len(sound),
        turns=turns / len(sound),
        invalid=(unparsed + sum(r.refused for r in sound)) / turns if turns else 0.0,
        unparsed=unparsed / turns if turns else 0.0,
    )


def by_type(results: Sequence[Result]) -> dict[str, Figures | None]:
    """Figures per kind of task, in alphabetical order, and last those of all."""
    kinds = sorted({r.type for r in results})
    rows = {kind: figures([r for r in results if r.type == kind]) for kind in kinds} if len(kinds) > 1 else {}
    return {**rows, OVERALL: figures(results)}


def interval(outcomes: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """95 % interval of the success rate from the outcomes of each task, one or several per task.

    One episode per task: Wilson's. Several: they are not independent, so tasks are resampled (percentile bootstrap);
    where every task has the same rate there is nothing to resample, and Wilson's with one observation per task is
    taken, which is wider than the truth. Raises ValueError for no outcome.
    """
    if not outcomes:
        raise ValueError("outcomes: got none, allowed: at least one task")
    rates = np.array([np.mean(runs) for runs in outcomes])
    counts = np.array([len(runs) for runs in outcomes])
    if counts.max() == 1 or (rates == rates[0]).all():
        wilson = stats.binomtest(round(rates.sum()), len(rates)).proportion_ci(LEVEL, method="wilson")
        return float(wilson.low), float(wilson.high)
    found = stats.bootstrap(
        (rates * counts, counts),
        lambda wins, episodes, axis: wins.sum(axis) / episodes.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def over_seeds(results: Sequence[Result]) -> dict[int, float]:
    """Success share of each seed's sound episodes."""
    seeds: dict[int, list[bool]] = {}
    for r in results:
        if not r.failed:
            seeds.setdefault(r.seed, []).append(r.success)
    return {seed: sum(runs) / len(runs) for seed, runs in sorted(seeds.items())}
