"""What suits each environment's warm start. To add one: a demonstrator, if need be, and an entry in `SETTINGS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.lab.demonstrators import clumsy_crafter, flawed_householder, forgetful

Demonstrator = Callable[..., list[str]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What suits one environment's warm start."""

    demonstrator: Demonstrator  # (task, rng) -> commands; also takes `data` where the environment needs some
    max_turns: int  # of a demonstration, and of the episodes that it warm-starts for
    options: dict[str, Any]  # for `TextEnv.tasks`
    architecture: dict[str, int]  # for `tiny.build_model`
    held_out: str = "held_out"  # the split to evaluate on


SETTINGS = {
    "alfworld": Setting(
        demonstrator=forgetful,
        max_turns=12,
        options={"types": ("pick_and_place_simple", "look_at_obj_in_light")},
        architecture={"layers": 3, "hidden": 64, "heads": 2, "kv_heads": 2},
        held_out="valid_seen",
    ),
    "rooms": Setting(
        demonstrator=flawed_householder,
        max_turns=10,
        options={"hub": False, "wordings": 3},
        architecture={"layers": 3, "hidden": 64, "heads": 2, "kv_heads": 2},
    ),
    "textcraft": Setting(
        demonstrator=clumsy_crafter,
        max_turns=8,
        options={"depth": (1, 2), "distractors": 2},
        architecture={"layers": 3, "hidden": 64, "heads": 2, "kv_heads": 2},
    ),
    "webshop": Setting(
        demonstrator=forgetful,
        max_turns=8,
        options={},
        architecture={"layers": 3, "hidden": 64, "heads": 2, "kv_heads": 2},
        held_out="test",
    ),
}


def default_tasks(env: str, split: str, data: str = "") -> list[dict[str, Any]]:
    """The tasks of `split` in the variant that the warm start plays."""
    return envs.env_class(env).tasks(split, **SETTINGS[env].options, **({"data": data} if data else {}))
