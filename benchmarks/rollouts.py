"""Rollouts that do not wait for one another, against lock-step: ``python benchmarks/rollouts.py``.

The engine is simulated: every response takes a while that varies as lengths of responses do (lognormal). Both sides
play the same tasks, draw the same latencies and use the same pool. In lock-step every turn waits for the slowest
member of the batch, as in a loop over turns around a batched `generate`. Two engines: one whose responses do not slow
each other down, and one that decodes faster the fewer it has at once (`--capacity`), which is kinder to lock-step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.evaluation.endpoint import Messages
from openrlhf_bipace.rollout.agent import AgentLoop, Generation, pool_of

COMMAND = "look around"  # changes nothing, so that every episode takes all its turns


class Engine:
    """Answers after ``tokens / speed`` seconds; the tokens of a response are lognormal around a median.

    Args:
        median: tokens of a response.
        sigma: spread of their logarithm (1.0: one response in twenty takes over five times the median).
        speed: tokens per second of one response alone.
        capacity: responses at once beyond which all slow down in proportion (0: none).
    """

    def __init__(self, median: float, sigma: float, speed: float, capacity: int = 0) -> None:
        self.median, self.sigma, self.speed, self.capacity = median, sigma, speed, capacity
        self._running = 0

    async def generate(self, episode: int, turn: int) -> None:
        left = self.median * random.Random(f"{episode} {turn}").lognormvariate(0, self.sigma) / self.speed
        self._running += 1
        try:
            while left > 0:  # in slices, because who else is running changes
                slow = max(1.0, self._running / self.capacity) if self.capacity else 1.0
                slice_ = min(left, 0.02 / slow) if self.capacity else left
                await asyncio.sleep(slice_ * slow)
                left -= slice_
        finally:
            self._running -= 1


async def independent(engine: Engine, config: AgentConfig, tasks: Sequence[dict]) -> int:
    """`AgentLoop` as the trainer runs it. Returns the turns played."""
    loop = AgentLoop(config, Messages(), 1 << 30)
    reply = [ord(character) for character in f"<action>{COMMAND}</action>"]

    async def play(number: int, task: dict) -> int:
        async def generate(context: list[int], max_tokens: int, turn: int) -> Generation:
            await engine.generate(number, turn)
            return Generation([*reply, Messages.eos_token_id], "stop")

        return len((await loop.run(task, str(number), 0, generate)).steps)

    played = await asyncio.gather(*(play(n, task) for n, task in enumerate(tasks)))
    loop.pool.close()
    return sum(played)


async def lock_step(engine: Engine, config: AgentConfig, tasks: Sequence[dict]) -> int:
    """All episodes turn by turn, in batches as large as the pool, without prompts. Returns the turns played."""
    pool, played = pool_of(config), 0
    for start in range(0, len(tasks), pool.capacity):
        numbers = range(start, min(start + pool.capacity, len(tasks)))
        async with AsyncExitStack() as stack:
            batch = [await stack.enter_async_context(pool.episode()) for _ in numbers]
            await asyncio.gather(*(env.reset(tasks[n]) for n, env in zip(numbers, batch, strict=True)))
            for turn in range(config.max_turns):
                await asyncio.gather(*(engine.generate(n, turn) for n in numbers))
                await asyncio.gather(*(env.step(COMMAND) for env in batch))
                played += len(batch)
    pool.close()
    return played


def measure(args: argparse.Namespace, turns: int, capacity: int) -> tuple[float, float, int]:
    """Seconds of lock-step, seconds of independent rollouts, turns played by each."""
    tasks = [envs.env_class("rooms").tasks("train")[n % 240] for n in range(args.episodes)]
    config = AgentConfig(env="rooms", template="terse", max_turns=turns, env_workers=args.slots)
    seconds, played = [], set()
    for way in (lock_step, independent):
        begin = time.perf_counter()
        played.add(asyncio.run(way(Engine(args.median, args.sigma, args.speed, capacity), config, tasks)))
        seconds.append(time.perf_counter() - begin)
    (total,) = played  # both played the same
    return *seconds, total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=64, help="episodes to play")
    parser.add_argument("--slots", type=int, default=64, help="episodes at once")
    parser.add_argument("--turns", type=int, nargs="+", default=[10, 50], help="turns per episode")
    parser.add_argument("--median", type=float, default=100, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of their logarithm")
    parser.add_argument("--speed", type=float, default=4000, help="tokens per second; quick, for a short run")
    parser.add_argument("--capacity", type=int, default=16, help="responses at once at full speed")
    args = parser.parse_args()
    table = Table(title=f"{args.episodes} episodes, {args.slots} at once, lognormal latency (sigma {args.sigma})")
    for heading in ("engine", "turns", "lock-step s", "independent s", "turns/s", "ratio"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    cases = [(turns, capacity) for capacity in (0, args.capacity) for turns in args.turns]
    for turns, capacity in tqdm(cases, unit="case"):
        slow, fast, played = measure(args, turns, capacity)
        engine = f"slows down beyond {capacity}" if capacity else "never slows down"
        table.add_row(engine, str(turns), f"{slow:.2f}", f"{fast:.2f}", f"{played / fast:.0f}", f"{slow / fast:.2f}")
    Console(width=119).print(table)


if __name__ == "__main__":
    main()
