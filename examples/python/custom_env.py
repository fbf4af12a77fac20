"""An environment of your own, whole: ``bipace-doctor env examples/python/custom_env.py`` checks it,
``bipace-train --agent.env examples/python/custom_env.py ...`` trains on it (docs/custom_environments.md)."""

import random

from openrlhf_bipace.envs import Observation, StepResult, TextEnv


class GuessEnv(TextEnv):
    max_turns = 8
    instructions = "Commands: a number from 1 to 20."

    def reset(self, task):
        self.check_task(task)
        self.number = random.Random(task["seed"]).randint(1, 20)
        return Observation("I think of a number from 1 to 20.", "guess the number")

    def step(self, text):
        if not text.strip().isdigit():
            return StepResult("That is no number.", 0.0, done=False, success=False, valid=False, executed="")
        guess = int(text)
        won = guess == self.number
        reply = "Right!" if won else f"{guess} is too {'low' if guess < self.number else 'high'}."
        return StepResult(reply, float(won), done=won, success=won, valid=True, executed=str(guess))

    @classmethod
    def tasks(cls, split):
        seeds = {"train": range(100), "held_out": range(100, 120)}
        if split not in seeds:
            raise ValueError(f"split: got {split!r}, allowed: {', '.join(seeds)}")
        return [{"seed": seed} for seed in seeds[split]]

    @classmethod
    def check_task(cls, task):
        if not isinstance(task.get("seed"), int):
            raise ValueError(f"seed: got {task.get('seed')!r}, allowed: an int")
