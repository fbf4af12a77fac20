"""A checkpoint in vLLM, on GPUs or its CPU build, as the policy behind `AgentLoop`, outside Ray and training."""

from __future__ import annotations

import random
from typing import Any
from uuid import uuid4

from openrlhf_bipace.integration import cpu
from openrlhf_bipace.rollout.agent import Generate, Generation


class VllmPolicy:
    """Make it inside the event loop that uses it.

    Args:
        model: folder or hub name.
        temperature, top_p: of the sampling.
        max_length: token budget of a whole conversation.
        tensor_parallel: GPUs the model is spread over.
    """

    def __init__(
        self, model: str, temperature: float, top_p: float = 1.0, max_length: int = 16384, tensor_parallel: int = 1
    ) -> None:
        options: dict[str, Any] = {"enable_prefix_caching": True, "tensor_parallel_size": tensor_parallel}
        if cpu.needed():
            cpu.install()
            ours = cpu.rollout_arguments()
            options |= {k: ours[k] for k in ("dtype", "block_size", "enable_chunked_prefill") if k in ours}
            options |= {"enforce_eager": True}
        import vllm

        self._sampling = {"temperature": temperature, "top_p": top_p}
        arguments = vllm.AsyncEngineArgs(model=model, max_model_len=max_length, **options)
        self._engine = vllm.AsyncLLMEngine.from_engine_args(arguments)

    def stream(self, name: str) -> Generate:
        """A `generate` for the episode `name`: what is sampled depends on it and the turn only."""
        import vllm

        async def generate(context: list[int], max_tokens: int, turn: int) -> Generation:
            seed = random.Random(f"{name} turn {turn}").getrandbits(31)
            params = vllm.SamplingParams(max_tokens=max_tokens, seed=seed, **self._sampling)
            prompt = vllm.TokensPrompt(prompt_token_ids=context)
            async for answer in self._engine.generate(prompt, params, uuid4().hex):
                output = answer.outputs[0]
            return Generation(list(output.token_ids), output.finish_reason)

        return generate

    async def close(self) -> None:
        """Free the engine."""
        self._engine.shutdown()
