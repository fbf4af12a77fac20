"""An OpenAI-compatible chat endpoint as the policy behind `AgentLoop`.

The loop speaks tokens, an endpoint speaks messages. `Messages` is a tokenizer whose tokens are characters and whose
chat template can be read back, so that an endpoint gets exactly the prompts that a model of our own would get.
"""

from __future__ import annotations

import os
import random
from typing import Any

from openrlhf_bipace.rollout.agent import Generate, Generation

RETRIES = 5  # of a request, after rate limits and server errors
_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters: no text holds them


class Messages:
    """Character tokens and a chat template that `parse` inverts."""

    chat_template = "one message is BEGIN role newline content END"
    eos_token, eos_token_id = _END, ord(_END)

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool = False, add_generation_prompt: bool = True
    ) -> str:
        text = "".join(f"{_BEGIN}{m['role']}\n{m['content']}{_END}" for m in messages)
        return f"{text}{_BEGIN}assistant\n" if add_generation_prompt else text

    def decode(self, ids: list[int], skip_special_tokens: bool = True, **options: Any) -> str:
        return "".join(chr(i) for i in ids if chr(i) not in (_BEGIN, _END))


def parse(context: list[int]) -> list[dict[str, str]]:
    """The messages in `context`, rendered by `Messages`, without the open assistant message at its end."""
    blocks = "".join(map(chr, context)).split(_BEGIN)[1:-1]
    parts = [block.removesuffix(_END).partition("\n") for block in blocks]
    return [{"role": role, "content": content} for role, _, content in parts]


class EndpointPolicy:
    """Sends every turn as a chat completion.

    Args:
        url: base address, for instance ``http://127.0.0.1:8000/v1``; the key is read from OPENAI_API_KEY.
        model: the name the endpoint knows.
        temperature, top_p: of the sampling.
    """

    def __init__(self, url: str, model: str, temperature: float, top_p: float = 1.0) -> None:
        from openai import AsyncOpenAI

        self._url = url
        # Servers of one's own ask for no key, the client does.
        key = os.environ.get("OPENAI_API_KEY", "none")
        self._client = AsyncOpenAI(base_url=url, api_key=key, max_retries=RETRIES, timeout=600.0)
        self._options: dict[str, Any] = {"model": model, "temperature": temperature, "top_p": top_p}

    def stream(self, name: str) -> Generate:
        """A `generate` for the episode `name`, which seeds the requests (an endpoint may ignore seeds).

        It raises ConnectionError where the endpoint fails for good.
        """
        from openai import OpenAIError

        async def generate(context: list[int], max_tokens: int, turn: int) -> Generation:
            try:
                messages: Any = parse(context)  # its type in the client is a long union
                answer = await self._client.chat.completions.create(
                    messages=messages,
                    max_tokens=max_tokens,
                    seed=random.Random(f"{name} turn {turn}").getrandbits(31),
                    **self._options,
                )
            except OpenAIError as error:
                raise ConnectionError(f"--endpoint {self._url}: {error}") from error
            choice = answer.choices[0]
            if choice.message.content is None:
                raise RuntimeError(f"the endpoint answered without text (finish reason {choice.finish_reason!r})")
            ids = [ord(c) for c in choice.message.content]
            if choice.finish_reason == "length":
                return Generation(ids, "length")
            return Generation([*ids, Messages.eos_token_id], "stop")

        return generate

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
