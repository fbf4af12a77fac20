"""Returns, scores and keys: from trajectories to the arrays that estimators read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from openrlhf_bipace.advantages.batch import StepBatch
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.envs.actions import action_key
from openrlhf_bipace.records import Trajectory


def discounted_returns(
    reward: torch.Tensor | np.ndarray | Sequence[float],
    trajectory: torch.Tensor | np.ndarray | Sequence[int],
    turn: torch.Tensor | np.ndarray | Sequence[int],
    gamma: float,
) -> torch.Tensor:
    """R_t = r_t + gamma R_{t+1} along each trajectory (spec section 1).

    Args:
        reward: [N] the turn's own reward; rows may come in any order.
        trajectory: [N] int, unique over the call.
        turn: [N] int, any numbers that rise with time (a gap does not discount more).
        gamma: discount per turn.

    Returns:
        [N] float64.
    """
    reward = torch.as_tensor(reward, dtype=torch.float64).cpu()
    trajectory, turn = torch.as_tensor(trajectory).cpu(), torch.as_tensor(turn).cpu()
    if not len(reward) == len(trajectory) == len(turn):
        raise ValueError(f"lengths differ: reward {len(reward)}, trajectory {len(trajectory)}, turn {len(turn)}")
    order = torch.from_numpy(np.lexsort([turn.numpy(), trajectory.numpy()]))
    owner, value = trajectory[order], reward[order]
    # Doubling: after pass j, value_t covers the 2^j rewards from t on, so the next 2^j are one look away.
    reach, discount = 1, gamma
    while reach < len(value):
        same = owner[reach:] == owner[:-reach]
        if not same.any():
            break
        value = torch.cat([value[:-reach] + torch.where(same, discount * value[reach:], 0.0), value[-reach:]])
        reach, discount = 2 * reach, discount**2
    return torch.empty_like(value).scatter_(0, order, value)


def from_trajectories(trajectories: Sequence[Trajectory], config: BipaceConfig) -> StepBatch:
    """The StepBatch of finished rollouts; `source_trajectory` and `source_step` lead back from its rows.

    Failed trajectories (`end.failed`) and those without a single response token say nothing about the policy: they
    are left out of every baseline and counted. The invalid-action penalty is subtracted after discounting from that
    turn's return and score only, so that it does not flow back to earlier turns [verl-agent]. It falls on turns whose
    response did not parse (`valid`); a command that the environment refused is an action like any other.

    Raises:
        ValueError: two trajectories with one (group, sample), or a reward that is NaN or infinite.
    """
    failed = sum(t.end.failed for t in trajectories)
    kept = [i for i, t in enumerate(trajectories) if t.counts]
    _check([trajectories[i] for i in kept])
    rows = [(i, j, trajectories[i], step) for i in kept for j, step in enumerate(trajectories[i].steps)]
    steps = [step for *_, step in rows]
    penalty = config.invalid_penalty * torch.tensor([not step.valid for step in steps], dtype=torch.float64)
    source = torch.tensor([i for i, *_ in rows], dtype=torch.int64)
    turn = torch.tensor([step.turn for step in steps], dtype=torch.int64)
    reward = torch.tensor([step.reward for step in steps], dtype=torch.float64)
    score = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    observations = [step.observation for step in steps]
    return StepBatch(
        group=[t.group for _, _, t, _ in rows],
        trajectory=[t.sample for _, _, t, _ in rows],
        turn=turn,
        ret=discounted_returns(reward, source, turn, config.gamma) - penalty,
        score=score[source] - penalty,
        action_key=[action_key(s.action, s.response_ids, s.valid, s.executed, config.action_key) for s in steps],
        observation_key=observations,
        observation_text=observations,
        state_key=[step.state_id for step in steps],
        valid=[step.valid for step in steps],
        source_trajectory=source,
        source_step=[j for _, j, _, _ in rows],
        trajectories_failed=failed,
        trajectories_empty=len(trajectories) - len(kept) - failed,
    )


def _check(trajectories: list[Trajectory]) -> None:
    seen = set()
    for t in trajectories:
        if (t.group, t.sample) in seen:
            raise ValueError(
                f"two trajectories are sample {t.sample} of group {t.group!r}, expected one of each number"
            )
        seen.add((t.group, t.sample))
        for step in t.steps:
            if not math.isfinite(step.reward):
                where = f"group {t.group}, trajectory {t.sample}, turn {step.turn}"
                raise ValueError(f"reward: got {step.reward} at {where}, expected a finite number")
