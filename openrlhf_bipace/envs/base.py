"""The contract every environment keeps: text in, text out, no tokens.

To add one: write `envs/<name>.py` with a `TextEnv` subclass and add one line to the registry in `envs/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(slots=True)
class Observation:
    """What `reset` returns: the first observation of an episode."""

    text: str  # what the policy sees; the text GiGPO hashes
    task: str  # the goal in words, constant over the episode
    admissible: list[str] = field(default_factory=list)  # commands that would be accepted now; empty if unknown
    state_id: str | None = None  # canonical id of the true state, where it is known


@dataclass(slots=True)
class StepResult:
    """What `step` returns: the consequence of one command."""

    text: str  # the next observation
    reward: float  # for this turn alone
    done: bool  # the episode is over
    success: bool  # the goal was reached (only ever true together with `done`)
    valid: bool  # the command was understood and allowed here
    executed: str  # the canonical command that was carried out; "" when `valid` is false
    admissible: list[str] = field(default_factory=list)
    state_id: str | None = None


class TextEnv(ABC):
    """One episode at a time. Not shared between threads; two instances never share mutable state."""

    max_turns: ClassVar[int] = 50  # default turn cap; the agent loop enforces it, not the environment
    # how commands look, in a sentence or two; put into the prompt by the templates that explain the format
    instructions: ClassVar[str] = ""

    @abstractmethod
    def reset(self, task: dict[str, Any]) -> Observation:
        """Start the episode `task` describes. The same task gives the same episode.

        The agent loop adds ``task["visit_seed"]`` (int, another one for every rollout of a group): an environment may
        draw its wordings from it, and nothing else.

        Raises ValueError naming the key, what was got and what is allowed when the task is malformed.
        """

    @abstractmethod
    def step(self, text: str) -> StepResult:
        """Carry out one command. Any text is legal: one that is not understood costs a turn (`valid` False)."""

    def close(self) -> None:  # noqa: B027 (most environments hold nothing)
        """Release what the episode holds. Called once, also after an error."""

    @classmethod
    @abstractmethod
    def tasks(cls, split: str, **options: Any) -> list[dict[str, Any]]:
        """Every task of `split`, in a fixed order. ValueError for an unknown split."""

    @classmethod
    @abstractmethod
    def check_task(cls, task: dict[str, Any]) -> None:
        """Raise the ValueError that `reset` would raise, without building anything expensive."""
