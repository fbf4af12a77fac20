"""Who plays: the environment's solver led astray, random commands, or the model itself, all through `AgentLoop`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.lab.policy import evaluate
from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.agent import AgentLoop, Generate, Generation

SOLVER, RANDOM, MODEL = PLAYERS = ("solver", "random", "model")
THINK, ACTION = RESPONSES = ("think", "action")  # of the scripted players
OWN = "own"  # the model's
# Reasoning that says nothing about the state; one is drawn for every turn.
THOUGHTS = (
    "I should think about what to do next.",
    "Let me take one step at a time.",
    "The task is clear, so I go on.",
    "I will try this and look at what happens.",
)


def script(
    env: envs.TextEnv, task: dict[str, Any], player: str, turns: int, noise: float, rng: random.Random
) -> list[str]:
    """Commands of one episode, `turns` of them unless it ends before; `env` plays along.

    solver: the known solution, command by command. With probability `noise` a turn takes a random command instead; the
    solver's is then lost in half the cases, else only late. After its last command the turns are random.
    random: every turn is. A random command is any admissible one; where the environment lists none, any of the
    solution's or `inventory`.

    Raises ValueError where the environment knows no solution that is needed.
    """
    solution, admissible = env.solution(task) or [], env.reset(task).admissible
    if not solution and (player == SOLVER or not admissible):
        raise ValueError(f"--players {player}: {task['env']} knows no solution of {task}; try model")
    ahead = list(solution) if player == SOLVER else []
    commands: list[str] = []
    while len(commands) < turns:
        astray = not ahead or rng.random() < noise
        if astray and ahead and rng.random() < 0.5:
            ahead.pop(0)
        commands.append(rng.choice(admissible or [*solution, "inventory"]) if astray else ahead.pop(0))
        result = env.step(commands[-1])
        if result.done:
            break
        admissible = result.admissible
    return commands


def recite(commands: Sequence[str], responses: str, tokenizer: Any, rng: random.Random) -> Generate:
    """A policy that gives `commands` one after the other, after a thought (`THINK`) or bare (`ACTION`)."""

    async def generate(context: list[int], max_tokens: int, turn: int) -> Generation:
        thought = f"<think>{rng.choice(THOUGHTS)}</think>" if responses == THINK else ""
        ids = tokenizer(f"{thought}<action>{commands[turn]}</action>", add_special_tokens=False)["input_ids"]
        return Generation([*ids, tokenizer.eos_token_id], "stop")

    return generate


def play(
    config: AgentConfig,
    model: Any,
    tokenizer: Any,
    tasks: Sequence[dict[str, Any]],
    player: str,
    responses: str,
    *,
    samples: int,
    noise: float,
    seed: int,
) -> list[Trajectory]:
    """`samples` episodes of every task by `player`; a task is a group. The model's `responses` are its own.

    Raises RuntimeError if the environment fails.
    """
    if player == MODEL:
        played = play_model(config, model, tokenizer, tasks, samples=samples, seed=seed)
    else:
        played = play_scripts(config, tokenizer, tasks, player, responses, samples=samples, noise=noise, seed=seed)
    for trajectory in played:
        if trajectory.end.failed:
            raise RuntimeError(f"an episode failed: {trajectory.error}")
    return played


def play_scripts(
    config: AgentConfig,
    tokenizer: Any,
    tasks: Sequence[dict[str, Any]],
    player: str,
    responses: str,
    *,
    samples: int,
    noise: float,
    seed: int,
) -> list[Trajectory]:
    """`samples` episodes of every task by a scripted `player`. A seed gives the same commands whatever `responses`."""
    shadow = envs.make(config.env, **({"data": config.data} if config.data else {}))
    loop = AgentLoop(config, tokenizer, 1 << 30)
    episodes = [(index, sample) for index in range(len(tasks)) for sample in range(samples)]

    async def play() -> list[Trajectory]:
        out = []
        for index, sample in tqdm(episodes, desc=f"   {player}, {responses}", unit="episode"):
            rng = random.Random(f"{seed} {player} {index} {sample}")
            limit = config.max_turns or shadow.max_turns
            commands = script(shadow, tasks[index], player, limit, noise, rng)
            generate = recite(commands, responses, tokenizer, rng)
            out.append(await loop.run(tasks[index], str(index), sample, generate, rng.getrandbits(31)))
        return out

    try:
        return asyncio.run(play())
    finally:
        loop.pool.close()
        shadow.close()


def play_model(
    config: AgentConfig, model: Any, tokenizer: Any, tasks: Sequence[dict[str, Any]], *, samples: int, seed: int
) -> list[Trajectory]:
    """`samples` episodes of every task by the model itself, sampled at temperature 1, a task at a time."""
    out = []
    for index, task in enumerate(tqdm(tasks, desc="   model", unit="task")):
        draws = random.Random(f"{seed} {index}").getrandbits(31)
        length = model.config.max_position_embeddings
        played = evaluate(model, tokenizer, config, [task], samples=samples, seed=draws, max_length=length)
        out += [replace(trajectory, group=str(index)) for trajectory in played]
    return out
