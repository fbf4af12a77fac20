"""Speed and memory of the environments: ``python benchmarks/environments.py --data FOLDER``.

FOLDER holds `alfworld` and `webshop` (default: BIPACE_DATA); an environment without data is left out, and said so.
ALFWorld is measured beside textworld's own engine, turn about on the same commands, and every text and list of
commands is compared on the way. All in one run on one machine: ratios hold where absolute times do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from openrlhf_bipace import data, envs
from openrlhf_bipace.envs.pool import EnvPool

# a command that changes nothing
IDLE = {"alfworld": "look", "rooms": "look around", "textcraft": "inventory", "webshop": "click[no such button]"}


class Clock:
    """Counts and times calls."""

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0

    def __call__(self, function: Any, *arguments: Any) -> Any:
        begin = time.perf_counter()
        answer = function(*arguments)
        self.seconds += time.perf_counter() - begin
        self.calls += 1
        return answer

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.calls / self.seconds


def commands(env: envs.TextEnv, name: str, task: dict[str, Any]) -> Iterator[str]:
    """The task's known solution with an idle command before each."""
    for command in env.solution(task) or []:
        yield from (IDLE[name], command)


def spread(tasks: Sequence[Any], count: int) -> list[Any]:
    """`count` of `tasks`, evenly spread."""
    return list(tasks[:: max(1, len(tasks) // count)][:count])


def alone(name: str, options: dict[str, Any], tasks: list[dict[str, Any]], steps: int, resets: int) -> dict[str, Any]:
    """One environment in this process: steps/s, first and later resets, memory over `resets` resets."""
    env, clocks = envs.make(name, **options), {key: Clock() for key in ("step", "first reset", "reset")}
    for task in tqdm(tasks, desc=f"{name}: first resets", leave=False):
        clocks["first reset"](env.reset, task)
    for task in cycle(tasks):
        clocks["reset"](env.reset, task)
        for command in commands(env, name, task):
            clocks["step"](env.step, command)
        if clocks["step"].calls >= steps:
            break
    memory = psutil.Process().memory_info
    before = memory().rss
    for task in tqdm(islice(cycle(tasks), resets), desc=f"{name}: {resets} resets", total=resets, leave=False):
        env.reset(task)
    grown = (memory().rss - before) / 2**20
    env.close()
    seconds = {key: clocks[key].seconds / clocks[key].calls for key in ("first reset", "reset")}
    return {"steps/s": clocks["step"].rate, "resets/s": clocks["reset"].rate, **seconds, "MB grown": grown}


async def pooled(name: str, options: dict[str, Any], tasks: list[dict[str, Any]], workers: int) -> float:
    """Steps per second of `workers` environments at once over 8 episodes each, resets included."""
    pool, env = EnvPool(name, options, workers=workers), envs.make(name, **options)
    scripts = {json.dumps(task): list(commands(env, name, task)) for task in tasks}
    env.close()

    async def play(task: dict[str, Any]) -> int:
        async with pool.episode() as episode:
            await episode.reset(task)
            for command in scripts[json.dumps(task)]:
                await episode.step(command)
        return len(scripts[json.dumps(task)])

    await asyncio.gather(*(play(task) for task in islice(cycle(tasks), workers)))  # starts the workers
    begin = time.perf_counter()
    steps = sum(await asyncio.gather(*(play(task) for task in islice(cycle(tasks), 8 * workers))))
    seconds = time.perf_counter() - begin
    pool.close()
    return steps / seconds


def against_stock(options: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """ALFWorld beside textworld's engine, on the same commands. RuntimeError where the two say different things."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

    from openrlhf_bipace.envs.alfworld import game_path

    wanted = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
    env = envs.make("alfworld", **options)
    clocks = {key: Clock() for key in ("ours", "stock", "our reset", "stock reset")}
    for task in tqdm(tasks, desc="alfworld beside the stock engine", leave=False):
        path = str(game_path(task, options["data"]))
        stock = textworld.start(path, wanted, wrappers=[AlfredDemangler(shuffle=False), AlfredInfos])
        theirs, ours = clocks["stock reset"](stock.reset), clocks["our reset"](env.reset, task)
        _compare(task, "reset", theirs, ours)
        for command in commands(env, "alfworld", task):
            theirs, _, won = clocks["stock"](stock.step, command)
            ours = clocks["ours"](env.step, command)
            _compare(task, command, theirs, ours)
            if won != ours.success:
                raise RuntimeError(f"{task}, {command!r}: won {won} in textworld, {ours.success} here")
    env.close()
    return {f"{key} /s": clock.rate for key, clock in clocks.items()} | {
        "games": len(tasks),
        "identical answers": clocks["stock"].calls + len(tasks),
        "times as many steps/s": clocks["ours"].rate / clocks["stock"].rate,
        "times as many resets/s": clocks["our reset"].rate / clocks["stock reset"].rate,
    }


def _compare(task: dict[str, Any], command: str, theirs: Any, ours: Any) -> None:
    if theirs.feedback != ours.text or theirs["admissible_commands"] != sorted([*ours.admissible, "help"]):
        raise RuntimeError(f"{task}, {command!r}: textworld answers {theirs.feedback!r}, we answer {ours.text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--env", nargs="+", default=envs.names(), choices=envs.names(), help="what to measure")
    parser.add_argument("--data", default=os.environ.get("BIPACE_DATA"), help="with a folder per environment")
    parser.add_argument("--tasks", type=int, default=24, help="different tasks of the last split that is here")
    parser.add_argument("--steps", type=int, default=2000, help="to time per environment")
    parser.add_argument("--resets", type=int, default=1000, help="over which memory is watched")
    parser.add_argument("--stock", type=int, default=12, help="games to play beside textworld's own engine (0: none)")
    parser.add_argument("--pool", type=int, nargs="*", default=[1, 2, 8], help="pool sizes")
    args = parser.parse_args()
    console = Console()
    table = Table("environment", "steps/s", "resets/s", "first reset", f"MB over {args.resets} resets", title="alone")
    pools = Table("environment", *(f"{n} at once" for n in args.pool), title="in a pool: steps/s, resets included")
    if args.data:
        os.environ["BIPACE_DATA"] = args.data
    for name in args.env:
        folder = data.folder_of(name)
        if data.SOURCES[name].folder and not folder:
            console.print(f"{name}: left out, its data are not here")
            continue
        options = {"data": folder} if folder else {}
        cls = envs.env_class(name)
        tasks = spread(_last_split(cls, options), args.tasks)
        row = alone(name, options, tasks, args.steps, args.resets)
        table.add_row(
            name,
            f"{row['steps/s']:,.0f}",
            f"{row['resets/s']:,.1f}",
            f"{row['first reset']:.3f} s",
            f"{row['MB grown']:.1f}",
        )
        pools.add_row(name, *(f"{asyncio.run(pooled(name, options, tasks, n)):,.0f}" for n in args.pool))
        if name == "alfworld" and args.stock:
            for key, value in against_stock(options, spread(tasks, args.stock)).items():
                console.print(f"alfworld, {key}: {value:,.1f}".removesuffix(".0"))
    console.print(table)
    console.print(pools)


def _last_split(cls: type[envs.TextEnv], options: dict[str, Any]) -> list[dict[str, Any]]:
    for split in reversed(cls.splits):
        try:
            return cls.tasks(split, **options)
        except ValueError:
            continue
    raise ValueError(f"{cls.__name__}: none of the splits {', '.join(cls.splits)} is here")


if __name__ == "__main__":
    main()
