"""One episode: an environment, a policy behind a `generate` callable, and a record of every turn.

No engine and no Ray in here, so the trainer, the lab and the tests drive the same loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.envs import actions, prompts
from openrlhf_bipace.envs.pool import EnvFailure, EnvPool, Episode
from openrlhf_bipace.records import EndReason, StepRecord, Trajectory
from openrlhf_bipace.rollout.context import ChatContext


@dataclass(slots=True)
class Generation:
    """One response of the engine."""

    token_ids: list[int]  # as sampled, the stop token included when it was sampled
    finish_reason: str  # "stop" or "length"
    logprobs: list[float] | None = None  # per token, under the rollout policy at its temperature


# (context token ids, max new tokens, turn) -> response
Generate = Callable[[list[int], int, int], Awaitable[Generation]]


def pool_of(config: AgentConfig) -> EnvPool:
    """The pool of environments that `config` describes."""
    return EnvPool(
        config.env,
        {"data": config.data} if config.data else {},
        workers=config.env_workers,
        step_timeout=config.step_timeout,
        reset_timeout=config.reset_timeout,
        recycle=config.env_recycle,
        memory_gib=config.env_memory,
    )


class AgentLoop:
    """Runs episodes of one environment.

    Args:
        config: environment, prompt template and budgets.
        tokenizer: the policy's tokenizer.
        max_length: token budget of a whole conversation, prompt included.
    """

    def __init__(self, config: AgentConfig, tokenizer: Any, max_length: int) -> None:
        self.config = config
        self.context = ChatContext(tokenizer)
        self.max_length = max_length
        self.pool = pool_of(config)

    async def run(
        self, task: dict[str, Any], group: str, sample: int, generate: Generate, visit_seed: int = 0
    ) -> Trajectory:
        """One episode of `task`. A failing environment ends this trajectory alone; a failing engine raises.

        `visit_seed` reaches the environment as ``task["visit_seed"]``: it may change wordings, never the episode.
        """
        trajectory = Trajectory(group=group, sample=sample, task=task)
        async with self.pool.episode() as env:
            try:
                start = await env.reset({**task, "visit_seed": visit_seed})
                await self._turns(env, start, trajectory, generate)
            except EnvFailure as failure:
                trajectory.end = failure.reason
                trajectory.error = f"{self.config.env}, task {task}, turn {len(trajectory.steps)}: {failure}"
        return trajectory

    async def _turns(self, env: Episode, start: envs.Observation, out: Trajectory, generate: Generate) -> None:
        cfg = self.config
        limit = cfg.max_turns or env.max_turns
        user = prompts.first_user(
            start.task,
            start.text,
            instructions=env.instructions,
            template=cfg.template,
            admissible=start.admissible,
            show_admissible=cfg.show_admissible,
            max_turns=limit,
        )
        observation, state_id = start.text, start.state_id
        context: list[int] = []
        new = self.context.first(user)
        for turn in range(limit):
            context = context + new
            budget = min(cfg.max_turn_tokens, self.max_length - len(context))
            if budget <= 0:
                out.end = EndReason.CONTEXT_FULL
                return
            reply = await generate(context, budget, turn)
            step, result = await self._act(env, turn, observation, state_id, new, reply)
            out.steps.append(step)
            if result.done:
                out.end, out.success = EndReason.DONE, result.success
                return
            context = context + reply.token_ids
            user = prompts.next_user(
                start.task,
                result.text,
                admissible=result.admissible,
                show_admissible=cfg.show_admissible,
                template=cfg.template,
            )
            new = self.context.next(reply.token_ids, user)
            observation, state_id = result.text, result.state_id
        out.end = EndReason.TURN_LIMIT

    async def _act(
        self, env: Episode, turn: int, observation: str, state_id: str | None, new: list[int], reply: Generation
    ) -> tuple[StepRecord, envs.StepResult]:
        text = self.context.decode(reply.token_ids)
        parsed = actions.parse(text, self.config.parser)
        # A response that does not parse costs a turn: the environment hears an empty command from the strict rule, and
        # from verl's what it made of it, as in verl-agent.
        result = await env.step(parsed.command)
        step = StepRecord(
            turn=turn,
            observation=observation,
            prompt_ids=new,
            response_ids=list(reply.token_ids),
            new_row=turn == 0,
            text=text,
            action=parsed.command if parsed.valid else "",
            valid=parsed.valid,
            reward=result.reward,
            finish_reason=reply.finish_reason,
            accepted=result.valid,
            executed=result.executed,
            state_id=state_id,
            action_start=self.context.token_at(reply.token_ids, parsed.start),
            logprobs=reply.logprobs,
        )
        return step, result
