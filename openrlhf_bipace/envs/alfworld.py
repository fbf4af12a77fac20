"""ALFWorld (Shridhar et al., arXiv 2010.03768): household tasks in text, played from real ``game.tw-pddl`` files.

Budgets and rewards are verl-agent's: 50 turns, reward 10 when the goal is reached and 0 everywhere else. The texts are
textworld's, unchanged (`alfworld_text`, `alfworld_engine`). The games are not part of this package: see
`openrlhf_bipace.data` for where they come from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from openrlhf_bipace.envs import alfworld_engine as engine
from openrlhf_bipace.envs.base import Observation, StepResult, TextEnv, check_keys, refuse
from openrlhf_bipace.envs.prompts import commands_text

SPLITS = ("train", "valid_train", "valid_seen", "valid_unseen")
TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
REWARD = 10.0
GAME_FILE = "game.tw-pddl"

_KEYS = ("env", "game", "split", "visit_seed")
_refuse = partial(refuse, "alfworld")


def games_folder(data: str = "") -> Path:
    """The folder that holds a folder per split, found at or under `data` ("": the environment variable ALFWORLD_DATA).

    Raises ValueError if there is none.
    """
    named = data or os.environ.get("ALFWORLD_DATA", "")
    if not named:
        _refuse("data", data, "a folder with ALFWorld's games, or ALFWORLD_DATA set to one (`bipace-data list` helps)")
    root = Path(named).expanduser().resolve()
    for folder in (root, root / "json_2.1.1"):
        if any((folder / split).is_dir() for split in SPLITS):
            return folder
    _refuse("data", named, f"a folder that holds one of {', '.join(SPLITS)}, or json_2.1.1 with those")


def type_of(game: str | Path) -> str:
    """The task type in a game's path, its folder's name up to the first "-". ValueError if it is none of `TYPES`."""
    parts = Path(game).parts
    kind = parts[-3].split("-")[0] if len(parts) >= 3 else ""
    if kind not in TYPES:
        _refuse("game", str(game), f"a path that ends TYPE-.../TRIAL/{GAME_FILE}, TYPE one of {', '.join(TYPES)}")
    return kind


class AlfworldEnv(TextEnv):
    """Reward 10 with `success` and `done` when the goal is reached.

    A task is ``{"env": "alfworld", "game": "valid_seen/TYPE-.../TRIAL/game.tw-pddl", "split": "valid_seen"}``. Only
    "game" is needed: a path, absolute or from the data folder; "visit_seed" is ignored. A command must be one of
    `admissible`, whatever its case and spacing; any other answers "Nothing happens." and is not `valid`. `help` is
    understood but not listed, as in verl-agent. `state_id` is a hash of the problem and of every fact that matters to
    what can happen next, so equal ids are one state.

    Run it in worker processes: translating a game holds a lock and catches what is printed meanwhile.

    Args:
        data: folder with the games; "" for the environment variable ALFWORLD_DATA.
    """

    max_turns: ClassVar[int] = 50
    splits: ClassVar[tuple[str, ...]] = SPLITS
    instructions: ClassVar[str] = commands_text("alfworld")

    def __init__(self, data: str = "") -> None:
        engine.check_installed()
        if data:
            games_folder(data)
        self._data = data
        self._player: engine.Player | None = None
        self._over = True

    @classmethod
    def tasks(cls, split: str, data: str = "", types: tuple[str, ...] | list[str] = TYPES) -> list[dict[str, Any]]:
        """The split's games of the given task types, sorted by path. ValueError for an unknown split or type."""
        if split not in SPLITS:
            _refuse("split", split, ", ".join(SPLITS))
        if not types or not set(types) <= set(TYPES):
            _refuse("types", types, f"one or several of {', '.join(TYPES)}")
        root = games_folder(data)
        games = sorted(path.relative_to(root) for path in (root / split).glob(f"*/*/{GAME_FILE}"))
        if not games:
            _refuse("split", split, f"a folder of {root} with games")
        return [{"env": "alfworld", "game": str(g), "split": split} for g in games if type_of(g) in types]

    @classmethod
    def check_task(cls, task: dict[str, Any], data: str = "") -> None:
        """ValueError naming the key, what was got and what is allowed; looks for the file only if `data` is given."""
        check_keys("alfworld", task, _KEYS)
        game = task.get("game")
        if not isinstance(game, str) or Path(game).name != GAME_FILE:
            _refuse("game", game, f"a path to a {GAME_FILE}")
        if task.get("split", SPLITS[0]) not in SPLITS:
            _refuse("split", task["split"], ", ".join(SPLITS))
        type_of(game)
        if data:
            game_path(task, data)

    def solution(self, task: dict[str, Any]) -> list[str] | None:
        """The walkthrough in the game's file, if it has one."""
        self.check_task(task)
        return engine.read_game(game_path(task, self._data)).get("walkthrough") or None

    def task_type(self, task: dict[str, Any]) -> str:
        self.check_task(task)
        return type_of(task["game"])

    def reset(self, task: dict[str, Any]) -> Observation:
        self.check_task(task)
        game = engine.load_game(str(game_path(task, self._data)))
        self._player = self._player or engine.Player()
        text = self._player.start(game)
        self._over = False
        goal = text.rpartition("Your task is to: ")[2].strip()
        return Observation(text, goal, self._listed(), self._player.state_id)

    def step(self, text: str) -> StepResult:
        """Carry out one command. Raises RuntimeError before the first `reset` and after the episode is over."""
        if self._player is None or self._over:
            raise RuntimeError("alfworld: step called without a running episode; call reset first")
        command = " ".join(text.lower().split())
        valid = command in self._player.admissible
        printed = self._player.act(command)
        won = self._over = self._player.won
        return StepResult(
            text=printed,
            reward=REWARD if won else 0.0,
            done=won,
            success=won,
            valid=valid,
            executed=command if valid else "",
            admissible=self._listed(),
            state_id=self._player.state_id,
        )

    def close(self) -> None:
        if self._player is not None:
            self._player.close()
            self._player, self._over = None, True

    def _listed(self) -> list[str]:
        return [command for command in self._player.admissible if command != "help"]


def game_path(task: Mapping[str, Any], data: str = "") -> Path:
    """The file of `task`, absolute. ValueError if it is not there."""
    game = Path(task["game"])
    path = game if game.is_absolute() else games_folder(data) / game
    if not path.is_file():
        _refuse("game", task["game"], f"a file; there is none at {path}")
    return path.resolve()
