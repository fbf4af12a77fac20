"""An environment that misbehaves as its task says, loaded by path as a user's own would be.

A task is ``{"turns": 3, "fault": "raise", "at": 1}``: `at` 0 is the reset, 1 the first step.
"""

from __future__ import annotations

import os
import sys
import time

from openrlhf_bipace.envs import Observation, StepResult, TextEnv


class Faulty(TextEnv):
    """Counts its steps and its episodes; wins after "turns" steps."""

    max_turns = 10
    instructions = "Say anything."

    def __init__(self, data: str = "") -> None:
        if data == "missing":
            raise FileNotFoundError("there are no games here")
        self.episodes, self.kept = 0, []

    def reset(self, task):
        self.task, self.turn = task, 0
        self.episodes += 1
        self._misbehave()
        return Observation(f"process {os.getpid()} episode {self.episodes}", "count")

    def step(self, text):
        self.turn += 1
        answer = self._misbehave()
        done = self.turn == self.task.get("turns", 3)
        if answer is not None:
            return answer
        return StepResult(f"turn {self.turn}", float(done), done, done, True, text)

    def _misbehave(self):
        fault = self.task.get("fault")
        if fault is None or self.turn != self.task.get("at", 1):
            return None
        if fault == "raise":
            raise OSError("the world broke")
        if fault == "sleep":
            time.sleep(3600)
        if fault == "exit":
            sys.exit(3)
        if fault == "die":
            os._exit(7)
        if fault == "leak":
            while True:
                self.kept.append(bytearray(50_000_000))
        if fault == "grow":
            self.kept.append(b"x" * 200_000_000)
            return None
        if fault == "megabytes":
            return StepResult("x" * 5_000_000, 0.0, False, False, False, "")
        if fault == "none":
            return None if self.turn == 0 else "not a result"
        if fault == "nan":
            return StepResult("a", float("nan"), False, False, True, "a")
        raise AssertionError(fault)

    @classmethod
    def tasks(cls, split):
        return [{"turns": n} for n in (1, 2, 3)]

    @classmethod
    def check_task(cls, task):
        if task.get("turns", 1) < 1:
            raise ValueError(f"turns: got {task['turns']}, allowed: 1 or more")


class SafeFaulty(Faulty):
    """The same in a thread."""

    thread_safe = True
