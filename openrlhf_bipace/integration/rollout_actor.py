"""The rollout actor: upstream's vLLM actor with our turn executor in place of its own.

Upstream's executor shares one SamplingParams between the samples of a prompt, has no per-turn cap, sums the turns'
rewards and forgets raw observations; none of it is reused.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from copy import deepcopy
from typing import Any

from openrlhf.trainer.ray.vllm_engine import RolloutRayActor as _RolloutRayActor
from openrlhf.utils.logging_utils import init_logger

from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.integration.host import undecorated
from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.agent import AgentLoop, Generation
from openrlhf_bipace.rollout.rows import rows_of

logger = init_logger(__name__)


def seed_of(*parts: Any) -> int:
    """A stable 31-bit seed from `parts`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF


class RolloutActor(undecorated(_RolloutRayActor)):
    """Runs the samples of one prompt as episodes of an environment."""

    async def __init__(self, *args: Any, agent_config: AgentConfig, **kwargs: Any) -> None:
        kwargs["agent_func_path"] = None
        await super().__init__(*args, **kwargs)
        self.agent_config = agent_config
        self._loop: AgentLoop | None = None
        self._weights = 0  # weight syncs so far

    async def update_weight(self, *args: Any, empty_cache: bool = False, **kwargs: Any) -> Any:
        """Upstream's; counts the syncs, of which only the last weight says `empty_cache`."""
        result = await super().update_weight(*args, empty_cache=empty_cache, **kwargs)
        self._weights += empty_cache
        return result

    async def update_weight_cuda_ipc(self, *args: Any, empty_cache: bool = False, **kwargs: Any) -> Any:
        """As `update_weight`, for weights that stay on the GPU."""
        result = await super().update_weight_cuda_ipc(*args, empty_cache=empty_cache, **kwargs)
        self._weights += empty_cache
        return result

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """`num_samples` episodes of the task in `label` (an envelope, see `samples.py`); one response each.

        A response holds upstream's keys, so that upstream's estimators work, and the whole `trajectory`.
        """
        if self._loop is None:
            self._loop = AgentLoop(self.agent_config, hf_tokenizer, max_length)
        envelope = json.loads(label)
        jobs = [self._episode(envelope, sample, sampling_params) for sample in range(num_samples)]
        trajectories = await asyncio.gather(*jobs)
        for t in trajectories:
            if t.end.failed:
                logger.error(f"Left out of the batch: sample {t.sample} of group {t.group} ({t.error})")
        return responses(prompt, json.dumps(envelope["task"]), trajectories, hf_tokenizer)

    async def _episode(self, envelope: dict[str, Any], sample: int, sampling_params: Any) -> Trajectory:
        async def generate(context: list[int], max_tokens: int, turn: int) -> Generation:
            params = deepcopy(sampling_params)  # shared by every sample of the batch
            params.max_tokens = max_tokens
            params.min_tokens = 0  # upstream's 1 masks the end token: sampled from another policy than the one trained
            if self.agent_config.seed_requests:
                params.seed = seed_of(envelope["seed"], sample, turn)
            weights = self._weights
            output = (await self.generate(context, params)).outputs[0]
            ids = list(output.token_ids)
            logprobs = None
            if output.logprobs is not None:
                logprobs = [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)]
            return Generation(ids, output.finish_reason, logprobs, weights)

        seed = seed_of(envelope["seed"], sample)
        return await self._loop.run(envelope["task"], envelope["group"], sample, generate, visit_seed=seed)


def responses(prompt: str, label: str, group: list[Trajectory], tokenizer: Any) -> list[dict[str, Any]]:
    """Upstream's response dictionaries for one group, one for each trajectory: its first row and the trajectory.

    With our estimators the training rows are made from the trajectory later. A failed trajectory becomes a row without
    action tokens, which weighs nothing; for upstream's estimators its reward is the mean of the group's others, so
    that it does not move their baseline.
    """
    sound = [t.reward for t in group if not t.end.failed]
    neutral = sum(sound) / len(sound) if sound else 0.0
    out = []
    for trajectory in group:
        rows = rows_of(trajectory)
        failed = trajectory.end.failed
        # A row needs two tokens: column t of a mask is about token t + 1.
        tokens = rows[0].tokens if rows else [tokenizer.eos_token_id] * 2
        cut = any(step.finish_reason == "length" for step in trajectory.steps)
        out.append(
            {
                "prompt": prompt,
                "label": label,
                "images": None,
                "mm_train_inputs": None,
                "reward": neutral if failed else trajectory.reward,
                "scores": neutral if failed else float(trajectory.success),
                "observation_tokens": tokens,
                "action_ranges": rows[0].spans if rows and not failed else [],
                "rollout_log_probs": (rows[0].logprobs or None) if rows else None,
                "truncated": trajectory.end.truncated or cut,
                "extra_logs": {},
                "trajectory": trajectory,
            }
        )
    return out
