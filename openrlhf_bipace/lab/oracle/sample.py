"""Groups of rollouts, as training samples them: the real environment, the shared records."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from openrlhf_bipace.envs.base import StepResult
from openrlhf_bipace.envs.rooms import RoomsEnv
from openrlhf_bipace.lab.oracle.world import PLAN, World
from openrlhf_bipace.records import EndReason, StepRecord, Trajectory

ACTION_ID = 100  # token ids from here on are actions, those below reasoning


@dataclass(slots=True)
class Rows:
    """What is known of each of N turns, in the order of `advantages.from_trajectories`."""

    task: np.ndarray  # [N] int
    turn: np.ndarray  # [N] int
    state: np.ndarray  # [N] int, in the task's model
    context: np.ndarray  # [N] int, in the world's tables
    action: np.ndarray  # [N] int, in the task's model
    free: np.ndarray  # [N, J] int, reasoning tokens that are independent of the action
    plan: np.ndarray  # [N] int, the token that depends on it (0 without a plan)


@dataclass(slots=True)
class Sample:
    """One resample: G rollouts of every task."""

    trajectories: list[Trajectory]
    rows: Rows
    phi: torch.Tensor  # [N, d] float64


@dataclass
class Sampler:
    """Draws resamples. The same (seed, number, task, rollout) gives the same actions, whatever G and the wordings."""

    world: World
    groups: int  # G, rollouts of each task
    seed: int
    env: RoomsEnv = field(default_factory=RoomsEnv)

    def __post_init__(self) -> None:
        reasoning = self.world.reasoning.values()
        self._below = self.world.probs.cumsum(axis=1)
        self._free = next((r.free.cumsum(axis=2) for r in reasoning if r.free is not None), None)
        plan = self.world.reasoning[PLAN].plan if PLAN in self.world.reasoning else None
        self._plan = None if plan is None else plan.cumsum(axis=2)

    def draw(self, number: int) -> Sample:
        """Resample `number`."""
        trajectories, found, phi = [], [], []
        for task in range(len(self.world.tasks)):
            for rollout in range(self.groups):
                trajectories.append(self._episode(number, task, rollout, found, phi))
        rows = Rows(*(np.array(column) for column in zip(*found, strict=True)))
        return Sample(trajectories, rows, torch.from_numpy(np.stack(phi)))

    def _episode(self, number: int, task: int, rollout: int, found: list, phi: list) -> Trajectory:
        world, model = self.world, self.world.models[task]
        rng = np.random.default_rng([self.seed, number, task, rollout])
        label = {**world.tasks[task], "visit_seed": int(rng.integers(2**31))}
        draws = rng.random((world.horizon, 2 + (0 if self._free is None else self._free.shape[1])))
        now = self.env.reset(label)
        out = Trajectory(group=str(task), sample=rollout, task=label, end=EndReason.TURN_LIMIT)
        for turn, (u, v, *w) in enumerate(draws):
            state = model.index[now.state_id]
            context = world.context(task, state, now.text)
            action = _pick(self._below[context], u)
            plan = 0 if self._plan is None else _pick(self._plan[context, action], v)
            free = [] if self._free is None else [_pick(b, x) for b, x in zip(self._free[context], w, strict=True)]
            found.append((task, turn, state, context, action, free, plan))
            phi.append(world.phi(context, now.text, plan))
            after = self.env.step(model.actions[action])
            ids = [*([] if self._plan is None else [plan]), *free, ACTION_ID + action]
            out.steps.append(_record(turn, now.text, now.state_id, model.actions[action], ids, after))
            if after.done:
                out.end, out.success = EndReason.DONE, after.success
                break
            now = after
        return out


def _pick(below: np.ndarray, u: float) -> int:
    return int(np.searchsorted(below, u * below[-1], side="right"))


def _record(turn: int, observation: str, state: str, command: str, ids: list[int], after: StepResult) -> StepRecord:
    return StepRecord(
        turn=turn,
        observation=observation,
        prompt_ids=[0],
        response_ids=ids,
        new_row=turn == 0,
        text=f"<action>{command}</action>",
        action=command,
        valid=True,
        reward=after.reward,
        finish_reason="stop",
        accepted=after.valid,
        executed=after.executed,
        state_id=state,
    )
