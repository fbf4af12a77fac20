"""--bipace.epsilon auto: the epsilon whose clusters best predict a return from other trajectories' returns [ours].

Within-cluster variance is nearly flat in epsilon and useless for this. The leave-one-out R^2 found the good epsilon on
healthy policies and stayed near 0 on a collapsed geometry, so it can also refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from openrlhf_bipace.advantages.batch import StepBatch
from openrlhf_bipace.advantages.segments import Parts, elsewhere, pair
from openrlhf_bipace.clustering import Clusters, cluster
from openrlhf_bipace.config import BipaceConfig

GRID = (0.0001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)


@dataclass(slots=True)
class Calibration:
    """What the scan found. `refused`: the geometry carries no state, use `advantages.state_only` in this iteration."""

    epsilon: float  # the smallest with the best R^2
    r2: float  # its R^2
    refused: bool  # r2 < config.min_r2
    curve: list[tuple[float, float]]  # (epsilon, R^2), as scanned
    giant_share: float  # rows of the largest cluster over its group's, at `epsilon`
    clusters: Clusters  # at `epsilon`, so that nobody clusters again

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


def calibrate(phi: Any, steps: StepBatch, config: BipaceConfig, *, grid: Sequence[float] = GRID) -> Calibration:
    """Cluster at every epsilon of `grid` and keep the one with the highest leave-one-out R^2.

    Args:
        phi: as for `cluster_steps`; only labels are needed here, so vectors may stay elsewhere.

    Raises:
        ValueError: an empty grid, or a bad vector, naming its group, trajectory and turn.
    """
    if not len(grid):
        raise ValueError("grid: got no epsilon to try")
    best: tuple[float, float, Clusters] | None = None
    curve = []
    for epsilon in sorted(grid):
        found = cluster_steps(phi, steps, config, epsilon)
        r2 = leave_one_out_r2(found.labels, steps, config.scope)
        curve.append((float(epsilon), r2))
        if best is None or r2 > best[0]:
            best = (r2, float(epsilon), found)
    assert best is not None  # the grid is not empty
    r2, epsilon, found = best
    return Calibration(epsilon, r2, r2 < config.min_r2, curve, _giant_share(found, steps, config.scope), found)


def leave_one_out_r2(cluster: torch.Tensor, steps: StepBatch, scope: str = "group") -> float:
    """How well cluster mates of *other* trajectories predict a return: 1 - error / error without clusters.

    Without clusters a return is predicted by m, the mean over the group's other trajectories. With them, by the mean
    of the k mates and one m: (sum + m) / (k + 1), so that a step without mates is neither rewarded nor punished. Rows
    whose group has no other trajectory do not count. 0 where nothing varies. With `scope` "batch" mates may be of
    other groups; m stays the own group's.
    """
    part, parts = pair(steps.within(scope)[0], cluster)
    x = Parts.of(steps.ret, steps.group, steps.groups).x  # only differences matter, and equal returns become zeros
    m, others = elsewhere(x, steps.row, steps.group, steps.groups)
    m = m / others.clamp(min=1)
    total, mates = elsewhere(x, steps.row, part, parts)
    guess = (total + m) / (mates + 1)
    counted = others > 0
    base = float(((x - m)[counted] ** 2).sum())
    error = float(((x - guess)[counted] ** 2).sum())
    return 1.0 - error / base if base > 0 else 0.0


def _giant_share(found: Clusters, steps: StepBatch, scope: str) -> float:
    if not len(steps):
        return 0.0
    within, _ = steps.within(scope)
    share = found.sizes / torch.bincount(within)[within[found.leader]]
    return float(share[found.sizes == found.sizes.max()].max())
