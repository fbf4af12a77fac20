"""Which settings the study runs: group sizes, wordings, epsilon, geometries, policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.envs.rooms import RoomsEnv
from openrlhf_bipace.lab.oracle import arms, model_world, world
from openrlhf_bipace.lab.oracle.geometry import GEOMETRIES
from openrlhf_bipace.lab.oracle.model_world import Tables
from openrlhf_bipace.lab.oracle.setting import Setting
from openrlhf_bipace.lab.oracle.size import Size

GAMMA = BipaceConfig().gamma
HORIZON = 10  # turns per episode, as in the warm start's episodes
GROUPS = 8  # rollouts per task of the base setting
HEALTHY_EPSILON, MODEL_EPSILON = 0.05, 0.02  # between the wordings of a state and the distances between states
DEMONSTRATOR, MODEL, THINKING = "demonstrator", "model", "thinking model"


def tasks(count: int, wordings: int) -> list[dict[str, Any]]:
    """The first `count` training tasks, without the hall."""
    return RoomsEnv.tasks("train", hub=False, wordings=wordings)[:count]


def models(size: Size, seed: int) -> dict[str, Callable[[], list[Tables]]]:
    """How to train and tabulate each tiny model."""
    options = {"seed": seed, "steps": size.steps, "episodes": size.episodes}
    labels = tasks(size.model_tasks, size.base_wordings)
    return {
        MODEL: partial(model_world.tabulate, labels, thoughts=False, **options),
        THINKING: partial(model_world.tabulate, labels, thoughts=True, **options),
    }


def settings(size: Size, seed: int, tables: dict[str, list[Tables]]) -> list[Setting]:
    """Every setting, the base one first. `tables`: what `models` made."""
    base = partial(_demonstrator, size, seed)
    every = [*arms.MAIN, *arms.choice_arms(), *arms.scan(size.grid)]
    scanned = [*arms.MAIN, *arms.scan(size.grid), arms.AUTO]
    groups, wordings = min(GROUPS, max(size.groups)), size.base_wordings
    out = [base(groups, wordings, "healthy", every)]
    out += [base(g, wordings, "healthy", arms.MAIN) for g in reversed(size.groups) if g != groups]  # longest first
    out += [base(groups, w, "healthy", arms.MAIN) for w in size.wordings if w != wordings]
    out.append(base(groups, wordings, "collapsed", scanned))
    for name, table in tables.items():
        for position in model_world.POSITIONS:
            wanted = every if (name, position) == (MODEL, "action_start") else scanned
            out.append(_model(size, seed, groups, name, table, position, wanted))
    return out


def _demonstrator(size: Size, seed: int, groups: int, wordings: int, geometry: str, wanted: list[arms.Arm]) -> Setting:
    labels = tasks(size.tasks, wordings)
    make = partial(world.tabular, labels, GEOMETRIES[geometry], gamma=GAMMA, horizon=HORIZON, seed=seed)
    name = _name(DEMONSTRATOR, geometry, groups, wordings, size.tasks)
    return Setting(name, make, groups, size.resamples, BipaceConfig(epsilon=HEALTHY_EPSILON), _once(wanted), seed)


def _model(
    size: Size, seed: int, groups: int, policy: str, table: list[Tables], position: str, wanted: list[arms.Arm]
) -> Setting:
    labels = tasks(size.model_tasks, size.base_wordings)
    make = partial(model_world.world_of, labels, table, position, GAMMA, HORIZON)
    name = _name(policy, position, groups, size.base_wordings, size.model_tasks)
    return Setting(name, make, groups, size.resamples, BipaceConfig(epsilon=MODEL_EPSILON), _once(wanted), seed)


def _name(policy: str, hidden: str, groups: int, wordings: int, count: int) -> dict[str, Any]:
    return {
        "environment": "rooms",
        "policy": policy,
        "hidden_state": hidden,
        "groups": groups,
        "texts_per_state": wordings**3,
        "tasks": count,
    }


def _once(wanted: list[arms.Arm]) -> list[arms.Arm]:
    return list(dict.fromkeys(wanted))
