"""A transformers model as the policy behind `AgentLoop`, in this process: what an engine does, for tiny models."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.agent import AgentLoop, Generate, Generation

MAX_BATCH = 128  # conversations that share one forward
_QUIET = 0.003  # seconds without a new call after which the waiting calls are answered


@dataclass(slots=True)
class _Call:
    context: list[int]
    max_tokens: int
    draw: random.Random  # of this response alone: what is sampled does not depend on who shares the batch
    answer: asyncio.Future[Generation]


class TorchPolicy:
    """Answers the `generate` calls of concurrent episodes in batches: left-padded, with a key-value cache.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer; the end-of-sequence token ends a response.
        temperature: of the sampling; 0 takes the likeliest token.
        seed: of the sampling. The same seed and streams give the same responses.

    Raises ValueError for a negative temperature.
    """

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0, seed: int = 0) -> None:
        if temperature < 0:
            raise ValueError(f"temperature: got {temperature}, allowed: 0 or more")
        self.model, self.tokenizer = model, tokenizer
        self.temperature, self.seed = temperature, seed
        self._waiting: list[_Call] = []
        self._flush: asyncio.Task[None] | None = None
        self._calls = 0

    async def generate(self, context: list[int], max_tokens: int, turn: int) -> Generation:
        """The response to `context`, with its tokens' log-probabilities at this temperature (at 1 where it is 0)."""
        self._calls += 1
        return await self._submit(context, max_tokens, f"call {self._calls}")

    def stream(self, name: str) -> Generate:
        """A `generate` for one episode, whose draws depend on `name`, the seed and the turn only."""

        async def generate(context: list[int], max_tokens: int, turn: int) -> Generation:
            return await self._submit(context, max_tokens, f"{name} turn {turn}")

        return generate

    async def _submit(self, context: list[int], max_tokens: int, name: str) -> Generation:
        loop = asyncio.get_running_loop()
        call = _Call(context, max_tokens, random.Random(f"{self.seed} {name}"), loop.create_future())
        self._waiting.append(call)
        if self._flush is None:
            self._flush = loop.create_task(self._answer())
        return await call.answer

    async def _answer(self) -> None:
        """Wait until no further episode is about to call, then answer all that wait."""
        count = 0
        while count < len(self._waiting):
            count = len(self._waiting)
            await asyncio.sleep(_QUIET)
        calls, self._waiting, self._flush = self._waiting, [], None
        calls.sort(key=lambda call: len(call.context))  # equal lengths together: less padding
        try:
            for start in range(0, len(calls), MAX_BATCH):
                batch = calls[start : start + MAX_BATCH]
                for call, reply in zip(batch, self._batch(batch), strict=True):
                    if not call.answer.done():
                        call.answer.set_result(reply)
        except Exception as error:  # every caller must hear of it, or it would wait for ever
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)

    @torch.no_grad()
    def _batch(self, calls: Sequence[_Call]) -> list[Generation]:
        width, eos = max(len(call.context) for call in calls), self.tokenizer.eos_token_id
        ids = torch.zeros(len(calls), width, dtype=torch.long, device=self.model.device)
        mask = torch.zeros_like(ids)
        for row, call in enumerate(calls):
            ids[row, width - len(call.context) :] = torch.tensor(call.context)
            mask[row, width - len(call.context) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache, replies = None, [Generation([], "length", []) for _ in calls]
        for length in range(1, max(call.max_tokens for call in calls) + 1):
            out = self.model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            tokens, logprobs = self._sample(out.logits[:, -1].float(), calls)
            unfinished = False
            for reply, call, token, logprob in zip(replies, calls, tokens.tolist(), logprobs.tolist(), strict=True):
                if reply.finish_reason == "stop" or length > call.max_tokens:
                    continue
                reply.token_ids.append(token)
                reply.logprobs.append(logprob)
                if token == eos:
                    reply.finish_reason = "stop"
                unfinished |= token != eos and length < call.max_tokens
            if not unfinished:
                break
            ids, positions = tokens[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(calls), 1)], dim=1)
        return replies

    def _sample(self, logits: torch.Tensor, calls: Sequence[_Call]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B] and their log-probabilities [B] from `logits` [B, vocabulary]."""
        if self.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            logits = logits / self.temperature
            below = logits.double().softmax(-1).cumsum(-1)
            draws = torch.tensor([[call.draw.random()] for call in calls], dtype=torch.float64, device=logits.device)
            tokens = torch.searchsorted(below, draws * below[:, -1:], right=True)[:, 0]
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def evaluate(
    model: Any,
    tokenizer: Any,
    agent_config: AgentConfig,
    tasks: Sequence[dict[str, Any]],
    *,
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    max_length: int = 1024,
) -> list[Trajectory]:
    """Play `samples` episodes of each task with `model`, through the trainer's own agent loop.

    Args:
        agent_config: environment, prompt template and budgets, as the trainer gets them.
        tasks: the prompt rows' labels.
        temperature: of the sampling; 0 is greedy.
        seed: of the sampling and of the environment's wordings.
        max_length: token budget of a whole conversation, prompt included.

    Returns the trajectories, the samples of a task next to one another; `group` is the task's position in `tasks`.
    """
    policy = TorchPolicy(model, tokenizer, temperature, seed)
    loop = AgentLoop(agent_config, tokenizer, max_length)

    async def play() -> list[Trajectory]:
        return await asyncio.gather(
            *(
                loop.run(task, str(index), sample, policy.stream(name), random.Random(name).getrandbits(31))
                for index, task in enumerate(tasks)
                for sample in range(samples)
                for name in (f"{seed} task {index} sample {sample}",)
            )
        )

    training = model.training
    model.eval()
    try:
        return asyncio.run(play())
    finally:
        model.train(training)
