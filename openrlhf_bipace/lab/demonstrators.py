"""Players that a warm start imitates: functions of (task, rng) that return the commands of one episode."""

from __future__ import annotations

import random
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.envs.rooms_solver import demonstration
from openrlhf_bipace.envs.textcraft_solver import solve


def flawed_householder(
    task: dict[str, Any], rng: random.Random, p_flawed: float = 0.75, p_random: float = 0.0
) -> list[str]:
    """Commands for `rooms` from somebody who, in 3 of 4 episodes, acts on fixed wrong beliefs.

    A share `p_random` of the commands is drawn from all that the environment accepts.

    The beliefs belong to objects and rooms (`rooms_solver.demonstration`), so the likeliest command is wrong too and
    training has something to find out that sharpening the clone would not give.
    """
    flawed = float(rng.random() < p_flawed)
    return demonstration(task, rng, p_random=p_random, p_systematic=flawed, p_force=flawed)


def clumsy_crafter(task: dict[str, Any], rng: random.Random, p_skip: float = 0.15) -> list[str]:
    """Commands for `textcraft` from a solver that forgets every seventh one, and so often fails."""
    commands = [command for command in solve(task) if rng.random() >= p_skip]
    return commands or ["inventory"]


def forgetful(task: dict[str, Any], rng: random.Random, data: str = "", p_skip: float = 0.1) -> list[str]:
    """The known solution of `task`, in any environment that has one, with every tenth command forgotten."""
    solution = envs.make(task["env"], **({"data": data} if data else {})).solution(task) or []
    return [command for command in solution if rng.random() >= p_skip] or solution
