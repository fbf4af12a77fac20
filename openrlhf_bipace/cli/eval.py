"""``bipace-eval``: play a policy on an environment's tasks and say how often it succeeds, with intervals.

The prompts, the parser and the budgets are those of training (``--agent.*``). Every episode is logged as it ends, and
the same command goes on where it was cut short. ``--policy random`` and ``--policy scripted`` need no model and try
out the harness.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf_bipace import config, envs
from openrlhf_bipace.config import AgentConfig

BASELINES, MODELS = ("random", "scripted"), ("hf", "vllm", "openai")
DEFAULTS = {"limit": 0, "temperature": 0.4, "seeds": [0]}
# name -> what it stands for; flags given beside it win. The paper: 128 validation games at temperature 0.4.
PRESETS = {"paper": {"limit": 128, "temperature": 0.4, "seeds": [0]}}
# Agent flags that change how fast or how safely episodes run, not what happens in them.
_RUNTIME = {f"env_{what}" for what in ("workers", "recycle", "memory")}
_RUNTIME |= {"data", "step_timeout", "reset_timeout", "seed_requests", "eval_at_start"}


def parser() -> argparse.ArgumentParser:
    """The command line of ``bipace-eval``."""
    out = argparse.ArgumentParser(
        prog="bipace-eval", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    who = out.add_argument_group("who plays")
    who.add_argument(
        "--policy", required=True, choices=[*BASELINES, *MODELS], help="random commands, the solution, ..."
    )
    who.add_argument("--model", nargs="+", default=[], metavar="MODEL", help="folders or names; several are compared")
    who.add_argument("--endpoint", default="", metavar="URL", help="OpenAI-compatible, for instance http://host/v1")
    who.add_argument("--temperature", type=float, help="of the sampling, 0 for the likeliest (default: 0.4)")
    who.add_argument("--top_p", type=float, default=1.0, help="of the sampling")
    who.add_argument("--max_length", type=int, default=16384, help="token budget of a whole conversation")
    who.add_argument("--tensor_parallel", type=int, default=1, help="vllm: GPUs that hold one model")
    what = out.add_argument_group("what is played")
    what.add_argument("--split", default="", help="every task of this split of --agent.env")
    what.add_argument("--tasks", default="", metavar="FILE", help="a prompt dataset (JSONL, column label) instead")
    what.add_argument(
        "--limit", type=int, help="play this many of the tasks, drawn once and for all (default: 0, all)"
    )
    what.add_argument(
        "--seeds", type=int, nargs="+", metavar="SEED", help="play every task once per seed (default: 0)"
    )
    what.add_argument("--preset", choices=PRESETS, help="paper: 128 tasks, temperature 0.4, one seed")
    run = out.add_argument_group("how")
    run.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="episodes and summary.json")
    run.add_argument("--concurrency", type=int, default=64, help="episodes at once")
    config.add_flags(out, ["agent"])
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``bipace-eval``. Exits with 2 and one line on a bad flag, with 1 if every episode failed."""
    from rich.console import Console

    from openrlhf_bipace.evaluation import report

    command = parser()
    args = command.parse_args(argv)
    try:
        agent = _settle(args)
        tasks = _tasks(args, agent)
        evaluated = {name: _evaluate(args, agent, model, tasks) for name, model in _policies(args).items()}
    except (ValueError, OSError) as error:
        command.exit(2, f"{command.prog}: error: {error}\n")
    console = Console()
    for table in report.tables(evaluated):
        console.print(table)
    summary = {"protocol": _protocol(args, agent, tasks), "seeds": args.seeds, **report.as_json(evaluated)}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(f"Written: {args.out}/summary.json", highlight=False)
    if all(found["overall"] is None for found in summary["policies"].values()):
        raise SystemExit(f"every episode failed, the first with: {next(iter(evaluated.values()))[0].error}")


def _settle(args: argparse.Namespace) -> AgentConfig:
    """Fill in preset and defaults, check what belongs together. ValueError naming a bad flag."""
    for name, value in {**DEFAULTS, **PRESETS.get(args.preset, {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    agent = config.from_args("agent", args)
    if not agent.env:
        raise ValueError(f"--agent.env: got nothing, allowed: {', '.join(envs.names())} or path/to/file.py:ClassName")
    agent.env = envs.absolute(agent.env)
    for flag, ok, allowed in (
        ("limit", args.limit >= 0, "0 or more"),
        ("temperature", args.temperature >= 0, "0 or more"),
        ("concurrency", args.concurrency >= 1, "1 or more"),
        ("seeds", len(set(args.seeds)) == len(args.seeds), "different numbers"),
        ("model", bool(args.model) == (args.policy in MODELS), "a model with hf, vllm and openai, else none"),
        ("endpoint", bool(args.endpoint) == (args.policy == "openai"), "an address with --policy openai, else none"),
        ("split", bool(args.split) != bool(args.tasks), "a split, or --tasks with a file"),
    ):
        if not ok:
            raise ValueError(f"--{flag}: got {getattr(args, flag)!r}, allowed: {allowed}")
    return agent


def _tasks(args: argparse.Namespace, agent: AgentConfig) -> list[dict[str, Any]]:
    """The tasks to play. ValueError for a bad split, file or task."""
    cls, options = envs.env_class(agent.env), _options(agent)
    if args.split:
        tasks = cls.tasks(args.split, **options)
    else:
        tasks = []
        for number, line in enumerate(Path(args.tasks).read_text().splitlines(), 1):
            try:
                tasks.append(json.loads(json.loads(line)["label"]))
                cls.check_task(tasks[-1])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"--tasks {args.tasks}, row {number}: {type(error).__name__}: {error}") from None
    if not tasks:
        raise ValueError(f"no tasks in {args.split or args.tasks!r}")
    if 0 < args.limit < len(tasks):
        tasks = [tasks[i] for i in sorted(random.Random(0).sample(range(len(tasks)), args.limit))]
    return tasks


def _options(agent: AgentConfig) -> dict[str, Any]:
    return {"data": agent.data} if agent.data else {}


def _policies(args: argparse.Namespace) -> dict[str, str]:
    """Name -> model. Checkpoints come in the order of training: by the last number of each name, if all have one."""
    if not args.model:
        return {args.policy: ""}
    names = {Path(model).name: model for model in args.model}
    if len(names) < len(args.model):
        names = {model.strip("/").replace("/", "_"): model for model in args.model}
    numbers = {name: re.findall(r"\d+", name) for name in names}
    if all(numbers.values()):
        return {name: names[name] for name in sorted(names, key=lambda name: int(numbers[name][-1]))}
    return names


def _protocol(args: argparse.Namespace, agent: AgentConfig, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the outcome of an episode depends on, the model apart."""
    found: dict[str, Any] = {
        "policy": args.policy,
        "agent": {key: value for key, value in asdict(agent).items() if key not in _RUNTIME},
        "tasks": f"{len(tasks)}, sha256 {hashlib.sha256(json.dumps(tasks).encode()).hexdigest()[:16]}",
    }
    if args.policy in MODELS:
        found |= {"temperature": args.temperature, "top_p": args.top_p, "max_length": args.max_length}
    return found


def _evaluate(args: argparse.Namespace, agent: AgentConfig, model: str, tasks: list[dict[str, Any]]) -> list:
    """Play what is missing for one policy; its results."""
    from openrlhf_bipace.evaluation.log import EpisodeLog
    from openrlhf_bipace.evaluation.play import play_missing

    name = next(name for name, path in _policies(args).items() if path == model)
    log = EpisodeLog(args.out / name / "episodes.jsonl", {**_protocol(args, agent, tasks), "model": model})
    namer = envs.make(agent.env, **_options(agent))
    kinds = [namer.task_type(task) for task in tasks]
    namer.close()

    async def play() -> None:
        async with _player(args, agent, model) as player:
            await play_missing(player, tasks, kinds, args.seeds, log, concurrency=args.concurrency)

    if any(not log.done(number, seed) for seed in args.seeds for number in range(len(tasks))):
        asyncio.run(play())
    return [result for result in log.results() if result.seed in args.seeds]


@asynccontextmanager
async def _player(args: argparse.Namespace, agent: AgentConfig, model: str) -> AsyncIterator[Any]:
    """Whoever --policy names; what it holds is freed at the end."""
    from openrlhf_bipace.evaluation.play import ModelPlayer
    from openrlhf_bipace.rollout.agent import AgentLoop, pool_of

    if args.policy in BASELINES:
        from openrlhf_bipace.evaluation.baselines import BaselinePlayer

        pool = pool_of(agent)
        try:
            yield BaselinePlayer(args.policy, agent, pool)
        finally:
            pool.close()
        return
    policy, tokenizer = _load(args, model)
    # An endpoint counts tokens itself; here its conversations are characters.
    loop = AgentLoop(agent, tokenizer, args.max_length if args.policy != "openai" else 1 << 30)
    try:
        yield ModelPlayer(loop, policy.stream)
    finally:
        loop.pool.close()
        if args.policy != "hf":
            await policy.close()


def _load(args: argparse.Namespace, model: str) -> tuple[Any, Any]:
    """The model's policy and tokenizer."""
    if args.policy == "openai":
        from openrlhf_bipace.evaluation.endpoint import EndpointPolicy, Messages

        return EndpointPolicy(args.endpoint, model, args.temperature, args.top_p), Messages()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    if args.policy == "vllm":
        from openrlhf_bipace.integration.vllm_eval import VllmPolicy

        return VllmPolicy(model, args.temperature, args.top_p, args.max_length, args.tensor_parallel), tokenizer
    import torch
    from transformers import AutoModelForCausalLM

    from openrlhf_bipace.lab.policy import TorchPolicy

    if args.top_p != 1.0:
        raise ValueError(f"--top_p: got {args.top_p}, allowed with --policy hf: 1.0")
    cuda = torch.cuda.is_available()
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype="auto" if cuda else torch.float32, trust_remote_code=True
    )
    return TorchPolicy(loaded.to("cuda" if cuda else "cpu").eval(), tokenizer, args.temperature), tokenizer


if __name__ == "__main__":
    main()
