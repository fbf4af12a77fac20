"""Policies that need no model: random commands, and the environment's own solution. They try out the harness."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.envs.pool import EnvFailure, EnvPool, Episode
from openrlhf_bipace.records import EndReason, StepRecord, Trajectory


def random_command(rng: random.Random, observation: str, admissible: Sequence[str]) -> str:
    """A random admissible command; where the environment tells none, a random line of the observation."""
    return rng.choice(list(admissible) or [line for line in observation.splitlines() if line.strip()] or ["look"])


class BaselinePlayer:
    """Plays without a model, through the same pool and under the same turn cap as `AgentLoop`.

    Args:
        kind: "random" or "scripted" (the environment's `solution`).
        config: environment and turn cap.
        pool: where the environments come from.
    """

    def __init__(self, kind: str, config: AgentConfig, pool: EnvPool) -> None:
        self.kind, self.config, self.pool = kind, config, pool
        self._solver = envs.make(config.env, **({"data": config.data} if config.data else {}))

    async def play(self, task: dict[str, Any], name: str, seed: int) -> Trajectory:
        """One episode. Raises ValueError where the environment knows no solution."""
        trajectory = Trajectory(group=name, sample=seed, task=task)
        script = self._solver.solution(task) if self.kind == "scripted" else None
        if self.kind == "scripted" and script is None:
            raise ValueError(f"--policy scripted: {self.config.env} knows no solution of {task}; try random")
        async with self.pool.episode() as env:
            try:
                await self._turns(env, trajectory, script, random.Random(f"{seed} {name}"))
            except EnvFailure as failure:
                trajectory.end, trajectory.error = failure.reason, str(failure)
        return trajectory

    async def _turns(self, env: Episode, out: Trajectory, script: list[str] | None, rng: random.Random) -> None:
        start = await env.reset({**out.task, "visit_seed": rng.getrandbits(31)})
        text, admissible = start.text, start.admissible
        out.end = EndReason.TURN_LIMIT
        for turn in range(self.config.max_turns or env.max_turns):
            if script is not None and turn == len(script):
                return
            command = script[turn] if script is not None else random_command(rng, text, admissible)
            result = await env.step(command)
            out.steps.append(_record(turn, text, command, result))
            if result.done:
                out.end, out.success, out.score = EndReason.DONE, result.success, result.score
                return
            text, admissible = result.text, result.admissible


def _record(turn: int, observation: str, command: str, result: envs.StepResult) -> StepRecord:
    return StepRecord(
        turn=turn,
        observation=observation,
        prompt_ids=[],
        response_ids=[],
        new_row=turn == 0,
        text=command,
        action=command,
        valid=True,
        reward=result.reward,
        finish_reason="stop",
        accepted=result.valid,
        executed=result.executed,
    )
