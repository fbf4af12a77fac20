"""Chat templates turn by turn: which token ids follow which, without ever re-tokenising what was sampled.

A conversation grows as ``first(user)``, response, ``next(user)``, response, ... and the ids equal a full render of the
same messages at every boundary. A template that rewrites earlier turns (Qwen3 drops old ``<think>`` blocks) cannot be
extended like that and is refused.
"""

from __future__ import annotations

from typing import Any

_USER, _REPLY = "USERPROBE", "<think>THOUGHTPROBE</think>REPLYPROBE"


class ChatContext:
    """Token ids of a growing conversation under one tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        grows: whether `next` will be called; a template that rewrites earlier turns still serves for single messages.

    Raises:
        ValueError: no chat template, or with `grows` one that does not render earlier turns unchanged.
    """

    def __init__(self, tokenizer: Any, grows: bool = True) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the model's tokenizer has no chat template; --agent.env needs one to tell turns apart")
        self.tokenizer = tokenizer
        if grows:
            self._learn_what_lies_between_turns()

    def _learn_what_lies_between_turns(self) -> None:
        head = self._render([_user(_USER)])
        full = self._render([_user(_USER), {"role": "assistant", "content": _REPLY}, _user(_USER + "2")])
        if not full.startswith(head + _REPLY):
            raise ValueError(
                "--agent.context full: the chat template changes earlier turns when the conversation goes on "
                f"(got {full[len(head) - 20 :]!r} after {head!r}); use --agent.context window, or a model whose "
                "template keeps them"
            )
        self._between, found, self._generation = full[len(head) + len(_REPLY) :].partition(_USER + "2")
        if not found:
            raise ValueError("the chat template does not render the user's message verbatim")
        self._eos_id, self._eos = self.tokenizer.eos_token_id, self.tokenizer.eos_token

    def first(self, user: str) -> list[int]:
        """Ids of the conversation's start: any system message, the user's message, the assistant's header."""
        return self._ids(self._render([_user(user.strip())]))

    def next(self, response_ids: list[int], user: str) -> list[int]:
        """Ids that follow `response_ids`: the end of the assistant's turn, the user's message, the next header.

        The end-of-turn token is added only where the response was cut before sampling it.
        """
        between = self._between
        if response_ids and response_ids[-1] == self._eos_id and between.startswith(self._eos):
            between = between[len(self._eos) :]
        return self._ids(between + user.strip() + self._generation)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_at(self, ids: list[int], char: int) -> int:
        """Index in `ids` of the token that holds character `char` of ``decode(ids)`` (0 if `char` is negative)."""
        if char <= 0:
            return 0
        # Decoding prefixes is exact for every tokenizer; offsets of a re-tokenisation would not be.
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.decode(ids[: middle + 1])) > char:
                high = middle
            else:
                low = middle + 1
        return min(low, len(ids) - 1)

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
