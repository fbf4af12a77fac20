"""Plays every task of an evaluation that its log does not hold yet."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tqdm import tqdm

from openrlhf_bipace.evaluation.log import EpisodeLog, result_of
from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.agent import AgentLoop, Generate


class Player(Protocol):
    """Whoever plays an episode. `name` identifies the task, and with `seed` everything that is random."""

    async def play(self, task: dict[str, Any], name: str, seed: int) -> Trajectory: ...


class ModelPlayer:
    """A model behind `AgentLoop`: prompts, parser and budgets exactly as in training.

    Args:
        loop: of the environment.
        stream: gives a `generate` for the episode of a name; what is sampled depends on the name only.
    """

    def __init__(self, loop: AgentLoop, stream: Callable[[str], Generate]) -> None:
        self.loop, self._stream = loop, stream

    async def play(self, task: dict[str, Any], name: str, seed: int) -> Trajectory:
        episode = f"task {name} seed {seed}"
        visit_seed = random.Random(episode).getrandbits(31)
        return await self.loop.run(task, name, seed, self._stream(episode), visit_seed)


async def play_missing(
    player: Player,
    tasks: Sequence[dict[str, Any]],
    kinds: Sequence[str],
    seeds: Sequence[int],
    log: EpisodeLog,
    *,
    concurrency: int = 64,
    progress: bool = True,
) -> None:
    """Play each task once per seed, `concurrency` episodes at once, and log each as it ends.

    An environment that fails costs its episode, which a later call plays again. A policy that fails ends the call;
    what was logged stays.

    Args:
        kinds: of each task.
    """
    todo = [(number, seed) for seed in seeds for number in range(len(tasks)) if not log.done(number, seed)]
    free = asyncio.Semaphore(concurrency)
    done = len(tasks) * len(seeds) - len(todo)
    with tqdm(total=len(tasks) * len(seeds), initial=done, unit="episode", disable=not progress) as bar:

        async def one(number: int, seed: int) -> None:
            async with free:
                begin = time.monotonic()
                trajectory = await player.play(tasks[number], str(number), seed)
            log.append(result_of(trajectory, number, seed, kinds[number], time.monotonic() - begin))
            if trajectory.end.failed:
                bar.write(f"failed: {trajectory.error}")
            bar.update()

        jobs = [asyncio.create_task(one(number, seed)) for number, seed in todo]
        try:
            await asyncio.gather(*jobs)
        except BaseException:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise
