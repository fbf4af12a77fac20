"""One episode: an environment, a policy behind a `generate` callable, and a record of every turn.

No engine and no Ray in here, so the trainer, the lab and the tests drive the same loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.envs import actions
from openrlhf_bipace.envs.pool import EnvFailure, EnvPool, Episode
from openrlhf_bipace.records import EndReason, StepRecord, Trajectory
from openrlhf_bipace.rollout.context import ChatContext
from openrlhf_bipace.rollout.prompting import FullContext, Prompt, WindowContext


@dataclass(slots=True)
class Generation:
    """One response of the engine."""

    token_ids: list[int]  # as sampled, the stop token included when it was sampled
    finish_reason: str  # "stop" or "length"
    logprobs: list[float] | None = None  # per token, under the rollout policy at its temperature
    weights: int = 0  # how often the engine had received new weights when it began


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
        max_length: token budget of a training row: a whole conversation, or with window context one prompt and its
            response.
    """

    def __init__(self, config: AgentConfig, tokenizer: Any, max_length: int) -> None:
        self.config = config
        self.context = ChatContext(tokenizer, grows=config.context == "full")
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
        prompting = self._prompting(env.instructions, start.task, limit)
        now: envs.Observation | envs.StepResult = start
        for turn in range(limit):
            prompt = prompting.prompt(now.text, now.admissible, out.steps)
            budget = min(cfg.max_turn_tokens, self.max_length - len(prompt.context))
            if budget <= 0:
                out.end = EndReason.CONTEXT_FULL
                return
            reply = await generate(prompt.context, budget, turn)
            step, result = await self._act(env, turn, now, prompt, reply)
            out.steps.append(step)
            if result.done:
                out.end, out.success, out.score = EndReason.DONE, result.success, result.score
                return
            now = result
        out.end = EndReason.TURN_LIMIT

    def _prompting(self, instructions: str, task: str, limit: int) -> FullContext | WindowContext:
        if self.config.context == "window":
            return WindowContext(self.config, self.context, instructions, task, limit, self.max_length)
        return FullContext(self.config, self.context, instructions, task, limit)

    async def _act(
        self,
        env: Episode,
        turn: int,
        seen: envs.Observation | envs.StepResult,
        prompt: Prompt,
        reply: Generation,
    ) -> tuple[StepRecord, envs.StepResult]:
        text = self.context.decode(reply.token_ids)
        parsed = actions.parse(text, self.config.parser)
        # A response that does not parse costs a turn: the environment hears an empty command from the strict rule, and
        # from verl's what it made of it, as in verl-agent.
        result = await env.step(parsed.command)
        step = StepRecord(
            turn=turn,
            observation=seen.text,
            prompt_ids=prompt.new,
            response_ids=list(reply.token_ids),
            new_row=prompt.new_row,
            text=text,
            action=parsed.command if parsed.valid else "",
            valid=parsed.valid,
            reward=result.reward,
            finish_reason=reply.finish_reason,
            accepted=result.valid,
            executed=result.executed,
            state_id=seen.state_id,
            action_start=self.context.token_at(reply.token_ids, parsed.start),
            logprobs=reply.logprobs,
            history_cut=prompt.history_cut,
            weights=reply.weights,
        )
        return step, result
