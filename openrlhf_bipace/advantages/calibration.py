"""--bipace.epsilon auto: the epsilon whose clusters best predict a return from other trajectories' returns [ours].

Within-cluster variance is nearly flat in epsilon and useless for this. The leave-one-out R^2 found the good epsilon on
healthy policies and stayed near 0 on a collapsed geometry, so it can also refuse. One iteration of few rollouts is too
noisy for either, so the errors are pooled over the iterations that are scanned, older ones fading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from openrlhf_bipace.advantages.batch import StepBatch
from openrlhf_bipace.advantages.segments import Parts, elsewhere, pair
from openrlhf_bipace.clustering import Clusters, cluster
from openrlhf_bipace.config import BipaceConfig

# Fine below 0.01: there lie the states of an untrained small model, whose vectors are nearly parallel.
GRID = (0.0001, 0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
FADE = 0.9  # of what earlier iterations count, per iteration: the geometry drifts
ENOUGH = 120  # trajectories after which a choice is kept: then the lab accepted a bad geometry in 4 to 15 % of runs


@dataclass(slots=True)
class Evidence:
    """Squared prediction errors, summed over the iterations scanned so far; plain numbers, for a checkpoint."""

    trajectories: float = 0.0
    base: float = 0.0  # error without clusters
    errors: list[float] = field(default_factory=list)  # with them, for each epsilon of the grid, ascending

    def faded(self, trajectories: int, base: float) -> Evidence:
        """A fading copy to which an iteration of so many trajectories and such an error without clusters is added."""
        errors = [FADE * error for error in self.errors]
        return Evidence(FADE * self.trajectories + trajectories, FADE * self.base + base, errors)


@dataclass(slots=True)
class Calibration:
    """What the scan found. `refused`: the geometry carries no state, use `advantages.state_only` in this iteration."""

    epsilon: float  # the smallest with the best R^2, pooled over the iterations scanned so far
    r2: float  # its R^2
    refused: bool  # r2 < config.min_r2
    curve: list[tuple[float, float]]  # (epsilon, pooled R^2), ascending
    giant_share: float  # rows of the largest cluster over its group's, at `epsilon`
    clusters: Clusters  # at `epsilon`, so that nobody clusters again
    evidence: Evidence  # what the next iteration's scan starts from

    @property
    def settled(self) -> bool:
        """Whether later iterations may keep `epsilon`."""
        return not self.refused and self.evidence.trajectories >= ENOUGH

    def diagnostics(self) -> dict[str, float]:
        """Flat names for the iteration's log."""
        return {
            "bipace/epsilon": self.epsilon,
            "bipace/r2": self.r2,
            "bipace/r2_refused": float(self.refused),
            "bipace/giant_share": self.giant_share,
        }

    def warning(self) -> str:
        """A sentence for the log when refused, else ""."""
        if not self.refused:
            return ""
        return (
            f"--bipace.epsilon auto: the best leave-one-out R^2 is {self.r2:.4f} (epsilon {self.epsilon:g}), under "
            "--bipace.min_r2: the hidden states carry no state"
        )


def cluster_steps(phi: Any, steps: StepBatch, config: BipaceConfig, epsilon: float) -> Clusters:
    """Cluster the steps by `phi` [N, d], or by whatever clusters for it: an object with a `cluster` method."""
    find = phi.cluster if hasattr(phi, "cluster") else partial(cluster, phi)
    return find(
        steps.within(config.scope)[0],
        epsilon,
        centroid=config.centroid,
        backend=config.cluster_backend,
        order=steps.order(config.order),
        names=steps.describe,
    )


def calibrate(
    phi: Any,
    steps: StepBatch,
    config: BipaceConfig,
    *,
    grid: Sequence[float] = GRID,
    before: Evidence | None = None,
) -> Calibration:
    """Cluster at every epsilon of `grid` and keep the one with the highest leave-one-out R^2.

    Args:
        phi: as for `cluster_steps`; only labels are needed here, so vectors may stay elsewhere.
        before: the evidence of the iterations before, on the same grid.

    Raises:
        ValueError: an empty grid or another one than before, or a bad vector, naming its group, trajectory and turn.
    """
    if not len(grid):
        raise ValueError("grid: got no epsilon to try")
    if before is None or not before.errors:
        before = Evidence(errors=[0.0] * len(grid))
    if len(before.errors) != len(grid):
        raise ValueError(f"grid: got {len(grid)} epsilons, expected the {len(before.errors)} of the iterations before")
    base, _ = _errors(steps.group, steps, config.scope)
    evidence = before.faded(steps.trajectories, base)
    best: tuple[float, float, Clusters] | None = None
    curve = []
    for i, epsilon in enumerate(sorted(map(float, grid))):
        found = cluster_steps(phi, steps, config, epsilon)
        evidence.errors[i] += _errors(found.labels, steps, config.scope)[1]
        r2 = _r2(evidence.base, evidence.errors[i])
        curve.append((epsilon, r2))
        if best is None or r2 > best[0]:
            best = (r2, epsilon, found)
    assert best is not None  # the grid is not empty
    r2, epsilon, found = best
    share = _giant_share(found, steps, config.scope)
    return Calibration(epsilon, r2, r2 < config.min_r2, curve, share, found, evidence)


def leave_one_out_r2(cluster: torch.Tensor, steps: StepBatch, scope: str = "group") -> float:
    """How well cluster mates of *other* trajectories predict a return: 1 - error / error without clusters.

    Without clusters a return is predicted by m, the mean over the group's other trajectories. With them, by the mean
    of the k mates and one m: (sum + m) / (k + 1), so that a step without mates is neither rewarded nor punished. Rows
    whose group has no other trajectory do not count. 0 where nothing varies. With `scope` "batch" mates may be of
    other groups; m stays the own group's.
    """
    return _r2(*_errors(cluster, steps, scope))


def _r2(base: float, error: float) -> float:
    return 1.0 - error / base if base > 0 else 0.0


def _errors(cluster: torch.Tensor, steps: StepBatch, scope: str) -> tuple[float, float]:
    """Summed squared errors of a return's prediction without and with clusters."""
    part, parts = pair(steps.within(scope)[0], cluster)
    x = Parts.of(steps.ret, steps.group, steps.groups).x  # only differences matter, and equal returns become zeros
    others, m = elsewhere(steps.row, steps.group, steps.groups, x)
    m = m / others.clamp(min=1)
    mates, total = elsewhere(steps.row, part, parts, x)
    guess = (total + m) / (mates + 1)
    counted = others > 0
    return float(((x - m)[counted] ** 2).sum()), float(((x - guess)[counted] ** 2).sum())


def _giant_share(found: Clusters, steps: StepBatch, scope: str) -> float:
    if not len(steps):
        return 0.0
    within, _ = steps.within(scope)
    share = found.sizes / torch.bincount(within)[within[found.leader]]
    return float(share[found.sizes == found.sizes.max()].max())
