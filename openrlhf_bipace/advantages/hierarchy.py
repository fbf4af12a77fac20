"""Empirical Bayes over nested parts: a mean of few returns is moved towards that of the part around it [ours].

The levels are the prompt group, the part (a hidden-state cluster, say), the members of the part with i's action, and
those of them whose previous action was the same too. Where returns of one level scatter with variance s2 around their
own mean, and those means with t2 around that of the level above, the best guess of such a mean, given n returns, is

    the guess of the level above + n / (n + k) * (mean of the n returns - that guess),        k = s2 / t2

(the normal model's posterior mean; Buehlmann's credibility, k its constant). V is the guess after the part, Q the one
after the last level, A = Q - V. A large pure part gives the paper's Q - V; in a part that mixes states the last level
tells them apart by how they were reached; a part of one, which the paper gives 0, is compared with its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from openrlhf_bipace.advantages.batch import Branch, StepBatch
from openrlhf_bipace.advantages.segments import Parts, add, elsewhere, pair, sizes
from openrlhf_bipace.config import BipaceConfig

K = 2.0  # k where it is not measured: the oracle lab's optimum is flat from 2 to 4
MOST = 5.0  # largest measured k: a level that seems to tell nothing still speaks, or the step part could vanish
NOTHING = 1e-9  # a difference of mean squares below this share of the mean square return is rounding

Labels = tuple[torch.Tensor, int]


def nested_baseline(steps: StepBatch, parts: Parts, config: BipaceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Q - V with the same k = 2 on every level -> ([N] float64, [N] int8 Branch)."""
    levels = _levels(steps, parts, config)
    return _advantage(steps, levels, [K] * (len(levels) - 1)), _branch(levels)


def eb_baseline(steps: StepBatch, parts: Parts, config: BipaceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Q - V with each level's k measured on the whole batch -> ([N] float64, [N] int8 Branch)."""
    levels = _levels(steps, parts, config)
    return _advantage(steps, levels, _measure(steps, levels)), _branch(levels)


def constants(steps: StepBatch, parts: Parts, config: BipaceConfig) -> dict[str, float]:
    """The k that `eb_baseline` measures, by the level they shrink, for the iteration's log."""
    measured = _measure(steps, _levels(steps, parts, config))
    return dict(zip(("bipace/k_part", "bipace/k_action", "bipace/k_history"), measured, strict=True))


def squares(x: torch.Tensor, row: torch.Tensor, labels: Labels) -> tuple[torch.Tensor, torch.Tensor]:
    """([N], [N]) sum of the squared differences to the label's rows of other trajectories, and their number.

    Pairs within a trajectory (`row` [N] int64) are left out: the returns of one rollout share its luck.
    """
    n, total, square = elsewhere(row, *labels, x, x.square())
    return (n * x.square() - 2 * x * total + square).clamp_(min=0), n


def noise_ratio(
    upper: tuple[torch.Tensor, torch.Tensor], lower: tuple[torch.Tensor, torch.Tensor], least: float
) -> float:
    """k = s2 / t2 of lower parts inside upper ones, from the `squares` of both; `MOST` if larger or if nothing tells.

    Two returns of one lower part differ by 2 s2 in mean square, two of one upper part but different lower parts by
    2 (s2 + t2). Only rows that have both kinds of partner count, so that both means are over the same rows. A
    difference of the means up to `least` is rounding.
    """
    (near, nears), (far, fars) = lower, (upper[0] - lower[0], upper[1] - lower[1])
    both = (nears > 0) & (fars > 0)
    if not both.any():
        return MOST
    within, across = (float(a[both].sum() / n[both].sum()) for a, n in ((near, nears), (far, fars)))
    between = across - within
    return min(within / between, MOST) if between > least else MOST


def _measure(steps: StepBatch, levels: Sequence[Labels]) -> list[float]:
    x = Parts.of(steps.ret, *levels[0]).x
    least = NOTHING * float(x.square().mean()) if len(x) else 0.0
    return [noise_ratio(a, b, least) for a, b in pairwise(squares(x, steps.row, level) for level in levels)]


def _levels(steps: StepBatch, parts: Parts, config: BipaceConfig) -> list[Labels]:
    """Group, part, action, previous action: [N] labels and their number, each nested in the one before."""
    action = pair(parts.label, steps.action_key)
    before = steps.action_key.index_select(0, steps.previous.clamp(min=0)) + 1
    history = pair(action[0], before.masked_fill(steps.previous < 0, 0))
    return [steps.within(config.scope), (parts.label, parts.count), action, history]


def _advantage(steps: StepBatch, levels: Sequence[Labels], k: Sequence[float]) -> torch.Tensor:
    """[N] guess after the last level minus that after the part; `k` has a number for each level but the first."""
    whole = Parts.of(steps.ret, *levels[0])
    guess, guesses = whole.mean, []
    for (label, count), constant in zip(levels[1:], k, strict=True):
        n = sizes(label, count)
        mean = add(whole.x, label, count) / n
        weight = n / (n + constant)
        guess = guess + weight.index_select(0, label) * (mean.index_select(0, label) - guess)
        guesses.append(guess)
    return guesses[-1] - guesses[0]


def _branch(levels: Sequence[Labels]) -> torch.Tensor:
    """[N] int8: alone in the part, the only one with its action there, or neither."""
    _, part, action, _ = levels
    alone, lone = (sizes(*labels).index_select(0, labels[0]) == 1 for labels in (part, action))
    branch = torch.full((len(alone),), int(Branch.PACE), dtype=torch.int8)
    return branch.masked_fill_(lone, int(Branch.FALLBACK)).masked_fill_(alone, int(Branch.SINGLETON))
