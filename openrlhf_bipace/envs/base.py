"""The contract every environment keeps: text in, text out, no tokens.

To add one: write `envs/<name>.py` with a `TextEnv` subclass and add one line to the registry in `envs/__init__.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, NoReturn

ANSWER_LIMIT = 1 << 20  # characters in all texts of one answer; no model reads more


def refuse(env: str, key: str, got: Any, allowed: str) -> NoReturn:
    """ValueError naming the environment, the key of a task or option, what was got and what is allowed."""
    raise ValueError(f"{env}: {key}: got {got!r}, allowed: {allowed}")


def check_keys(env: str, task: Any, keys: Iterable[str]) -> None:
    """Refuse a task that is no dict, has a key not among `keys`, or belongs to another environment than `env`."""
    if not isinstance(task, Mapping):
        refuse(env, "task", task, "a dict")
    for key in task:
        if key not in keys:
            refuse(env, "key", key, ", ".join(keys))
    if task.get("env", env) != env:
        refuse(env, "env", task["env"], env)


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
    score: float | None = None  # how much of the goal was met, in [0, 1], where that is graded; only with `done`


class TextEnv(ABC):
    """One episode at a time. Not shared between threads; two instances never share mutable state.

    The same instance plays one episode after the other, each begun by `reset`.
    """

    # several instances may run at once in threads of one process; False gives each a process of its own (`pool.py`)
    thread_safe: ClassVar[bool] = False
    splits: ClassVar[tuple[str, ...]] = ("train", "held_out")  # what `tasks` accepts, the one to train on first
    max_turns: ClassVar[int] = 50  # default turn cap; the agent loop enforces it, not the environment
    # how commands look, in a sentence or two; put into the prompt by the templates that explain the format
    instructions: ClassVar[str] = ""

    @abstractmethod
    def reset(self, task: dict[str, Any]) -> Observation:
        """Start the episode `task` describes, whatever was going on before. The same task gives the same episode.

        The agent loop adds ``task["visit_seed"]`` (int, another one for every rollout of a group): an environment may
        draw its wordings from it, and nothing else.

        Raises ValueError naming the key, what was got and what is allowed when the task is malformed.
        """

    @abstractmethod
    def step(self, text: str) -> StepResult:
        """Carry out one command. Any text is legal: one that is not understood costs a turn (`valid` False)."""

    def close(self) -> None:  # noqa: B027 (most environments hold nothing)
        """Release what the environment holds. Called after the last episode or an error; twice does no harm."""

    def solution(self, task: dict[str, Any]) -> list[str] | None:
        """Commands that win the episode of `task`; None where the environment knows none. Leaves the episode alone."""
        return None

    def task_type(self, task: dict[str, Any]) -> str:
        """The kind of `task`, for success per kind; "all" where there are no kinds. Leaves the episode alone."""
        return "all"

    @classmethod
    @abstractmethod
    def tasks(cls, split: str, **options: Any) -> list[dict[str, Any]]:
        """Every task of `split`, in a fixed order. ValueError for an unknown split."""

    @classmethod
    @abstractmethod
    def check_task(cls, task: dict[str, Any]) -> None:
        """Raise the ValueError that `reset` would raise, without building anything expensive."""


def checked(method: str, answer: Any, limit: int = ANSWER_LIMIT) -> Observation | StepResult:
    """`answer` of ``reset`` or ``step`` in plain Python types.

    Raises TypeError or ValueError naming the field, what was got and what is allowed: for a wrong type, a reward that
    is no finite number, success without done, and texts of more than `limit` characters together.
    """
    kind = Observation if method == "reset" else StepResult
    if not isinstance(answer, kind):
        raise TypeError(f"{method} returned {type(answer).__name__}, allowed: {kind.__name__}")
    strings = {"text": answer.text}
    if isinstance(answer, StepResult):
        strings["executed"] = answer.executed
        _check_step(answer)
    else:
        strings["task"] = answer.task
    if answer.state_id is not None:
        strings["state_id"] = answer.state_id
    for field_name, value in strings.items():
        if not isinstance(value, str):
            raise TypeError(f"{method}: {field_name}: got {type(value).__name__}, allowed: str")
    if not isinstance(answer.admissible, list) or not all(isinstance(c, str) for c in answer.admissible):
        raise TypeError(f"{method}: admissible: got {type(answer.admissible).__name__}, allowed: a list of str")
    size = sum(map(len, strings.values())) + sum(map(len, answer.admissible))
    if size > limit:
        raise ValueError(f"{method} returned {size:,} characters of text, allowed: {limit:,}")
    plain = {name: getattr(answer, name) for name in kind.__dataclass_fields__}
    if isinstance(answer, StepResult):
        plain["reward"] = float(answer.reward)
        plain["score"] = None if answer.score is None else float(answer.score)
    return kind(**plain)


def _check_step(answer: StepResult) -> None:
    for name in ("done", "success", "valid"):
        if not isinstance(getattr(answer, name), bool):
            raise TypeError(f"step: {name}: got {getattr(answer, name)!r}, allowed: True or False")
    if not isinstance(answer.reward, Real) or not math.isfinite(answer.reward):
        raise ValueError(f"step: reward: got {answer.reward!r}, allowed: a finite number")
    if answer.score is not None and not (isinstance(answer.score, Real) and 0 <= answer.score <= 1):
        raise ValueError(f"step: score: got {answer.score!r}, allowed: None or a number in [0, 1]")
    if answer.success and not answer.done:
        raise ValueError("step: success: got True without done, allowed: success only at the end of an episode")
