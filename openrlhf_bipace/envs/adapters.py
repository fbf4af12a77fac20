"""Gymnasium-style text environments as `TextEnv`: subclass `GymnasiumEnv` and say how to make one. Needs no gymnasium.

::

    class Guess(GymnasiumEnv):
        goal = "guess the number"
        seeds = {"train": range(1000), "held_out": range(1000, 1100)}

        def make_env(self):
            return gymnasium.make("my/Guess-v0")
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from openrlhf_bipace.envs.base import Observation, StepResult, TextEnv


class GymnasiumEnv(TextEnv):
    """What ``reset(seed=...)`` and ``step(action)`` of a Gymnasium environment say, in our terms.

    A task is ``{"split": "train", "seed": 17}``: the seed goes to ``reset``. An episode is over when the environment
    says terminated or truncated. ``info["admissible"]``, where there is one, lists the commands accepted now. Override
    the small methods below where an environment differs.
    """

    goal: ClassVar[str] = ""  # the task in words, for the prompt
    seeds: ClassVar[dict[str, range]] = {"train": range(1000), "held_out": range(1000, 1100)}  # split -> seeds

    def __init_subclass__(cls) -> None:
        cls.splits = tuple(cls.seeds)

    def __init__(self) -> None:
        self._env: Any = None
        self._admissible: list[str] = []

    @abstractmethod
    def make_env(self) -> Any:
        """The Gymnasium environment. Called once, before the first episode."""

    def goal_text(self, task: dict[str, Any], info: dict[str, Any]) -> str:
        """The task in words."""
        return self.goal

    def observation_text(self, observation: Any, info: dict[str, Any]) -> str:
        """The observation in words; TypeError unless it is words already."""
        if not isinstance(observation, str):
            raise TypeError(
                f"{type(self).__name__}: got an observation of type {type(observation).__name__}, allowed: str, or "
                "override observation_text"
            )
        return observation

    def admissible(self, info: dict[str, Any]) -> list[str]:
        """Commands accepted now; none where the environment does not tell."""
        return list(info.get("admissible", []))

    def action_of(self, command: str) -> Any:
        """The environment's action for `command`, None if it is none. By default the text itself, if it is admissible
        or nothing is known about that."""
        return command if command and (not self._admissible or command in self._admissible) else None

    def succeeded(self, reward: float, terminated: bool, info: dict[str, Any]) -> bool:
        """Was the goal reached? Asked at the end. By default ``info["success"]``, which must be there."""
        if "success" not in info:
            raise KeyError(f'{type(self).__name__}: info has no "success" at the end; override succeeded')
        return bool(info["success"])

    def reset(self, task: dict[str, Any]) -> Observation:
        self.check_task(task)
        if self._env is None:
            self._env = self.make_env()
        observation, info = self._env.reset(seed=task["seed"])
        self._text, self._admissible, self._over = (
            self.observation_text(observation, info),
            self.admissible(info),
            False,
        )
        return Observation(self._text, self.goal_text(task, info), list(self._admissible))

    def step(self, text: str) -> StepResult:
        """A command without an action leaves the environment alone: the observation again, after a word of refusal."""
        if self._env is None or self._over:
            raise RuntimeError(f"{type(self).__name__}: step called outside an episode; call reset first")
        command = " ".join(text.split())
        action = self.action_of(command)
        if action is None:
            refusal = f"Nothing happens.\n{self._text}"
            return StepResult(refusal, 0.0, False, False, False, "", list(self._admissible))
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._over = bool(terminated or truncated)
        self._text, self._admissible = self.observation_text(observation, info), self.admissible(info)
        success = self._over and self.succeeded(float(reward), bool(terminated), info)
        return StepResult(self._text, float(reward), self._over, success, True, command, list(self._admissible))

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    @classmethod
    def tasks(cls, split: str) -> list[dict[str, Any]]:
        if split not in cls.seeds:
            raise ValueError(f"{cls.__name__}: split: got {split!r}, allowed: {', '.join(cls.seeds)}")
        return [{"split": split, "seed": seed} for seed in cls.seeds[split]]

    @classmethod
    def check_task(cls, task: dict[str, Any]) -> None:
        split, seed = task.get("split"), task.get("seed")
        if split not in cls.seeds or not isinstance(seed, int) or seed not in cls.seeds[split]:
            raise ValueError(
                f"{cls.__name__}: task: got split {split!r} and seed {seed!r}, allowed: "
                + ", ".join(f"{name} with {s.start} to {s.stop - 1}" for name, s in cls.seeds.items())
            )
