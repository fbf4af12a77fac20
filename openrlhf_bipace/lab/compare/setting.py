"""What is trained on: the environment, the warm start's recipe, the budgets. Both engines read the same `Setting`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """One learning problem. In context window a turn reads the task and the present observation only."""

    env: str
    options: dict[str, Any]  # of `TextEnv.tasks`
    thoughts: int  # idle words of reasoning before every command
    max_turns: int
    max_turn_tokens: int
    errors: dict[str, float]  # options of the environment's demonstrator, such that its clone solves 20 to 30 %
    iterations: int
    lr: float
    bipace: dict[str, Any] = field(default_factory=dict)  # `BipaceConfig` fields that every arm shares
    tasks: int = 4  # prompts per iteration
    samples: int = 8  # rollouts per prompt
    eval_every: int = 5  # iterations
    eval_samples: int = 1  # rollouts per evaluated task
    eval_tasks: int = 64
    eval_split: str = "held_out"  # or "train": new draws on the tasks that are trained on
    train_tasks: int = 0  # that training draws from, taken from all over the split; 0: all
    context: str = "window"
    episodes: int = 1500  # demonstrations
    clone_steps: int = 900
    batch_size: int = 48  # turns per step of cloning

    @property
    def agent(self) -> AgentConfig:
        """How episodes are played."""
        return AgentConfig(
            env=self.env,
            template="terse",
            context=self.context,
            history=0,
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
        )

    def split(self, name: str) -> list[dict[str, Any]]:
        """The tasks of a split, in the setting's variant."""
        return envs.env_class(self.env).tasks(name, **self.options)

    def trained(self) -> list[dict[str, Any]]:
        """The tasks that training draws from."""
        tasks = self.split("train")
        return _spread(tasks, self.train_tasks) if self.train_tasks else tasks

    def evaluated(self) -> list[dict[str, Any]]:
        """The tasks that the learning curve is measured on."""
        tasks = self.trained() if self.eval_split == "train" else self.split(self.eval_split)
        return _spread(tasks, self.eval_tasks)


def _spread(tasks: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Every k-th of the tasks with the largest k that leaves `count`, and no more than `count`."""
    return tasks[:: max(1, len(tasks) // count)][:count]


REASONING = Setting(
    env="rooms",
    options={"hub": True, "wordings": 2},  # every move passes the hall; 2 x 2 x 2 texts per state
    thoughts=4,
    max_turns=16,
    max_turn_tokens=16,
    errors={"p_flawed": 0.9},
    iterations=25,
    lr=1e-3,
    bipace={"layer": -2, "position": "action_start", "epsilon": 0.02, "w": 10.0},  # w: success pays 1, the paper's 10
)
# the same from a player who also draws every tenth command at random: a clone that tries things
VARIED = replace(
    REASONING, errors={"p_flawed": 0.75, "p_random": 0.1}, eval_samples=2, episodes=3000, clone_steps=2000
)
SETTINGS = {
    # free reasoning tokens before the action: one action key covers many token sequences
    "rooms_reasoning": REASONING,
    "rooms_varied": VARIED,
    "rooms_confirm": VARIED,  # from other warm starts
    "rooms_action": replace(REASONING, thoughts=0, max_turn_tokens=8),
    "textcraft": Setting(
        env="textcraft",
        options={"depth": (1, 2), "distractors": 2},
        thoughts=0,
        max_turns=8,
        max_turn_tokens=32,
        errors={"p_skip": 0.45},
        iterations=25,
        lr=1e-3,
        bipace=REASONING.bipace,
        context="full",
        clone_steps=800,
        batch_size=8,
        eval_split="train",
        eval_samples=2,
        train_tasks=32,
    ),
}

# changes that make any setting tiny, to show that everything runs
QUICK = {
    "iterations": 2, "eval_every": 1, "eval_tasks": 4, "tasks": 2, "samples": 3, "max_turns": 4, "clone_steps": 20,
    "episodes": 40,
}  # fmt: skip
