"""``bipace-data list | verify | prepare``: the environments' data, and prompt datasets made of them.

Nothing is downloaded. A folder is named with --data, or is ``$BIPACE_DATA/<environment>``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.data import SOURCES, Check, folder_of, verify, write_tasks


def parser() -> argparse.ArgumentParser:
    """The command line of ``bipace-data``."""
    out = argparse.ArgumentParser(prog="bipace-data", description=(__doc__ or "").partition("\n")[2].strip())
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="every environment: its data, where they come from, their licence, what is here")
    check = commands.add_parser("verify", help="are an environment's data here and whole? Exits with 1 if not")
    check.add_argument("env", choices=list(SOURCES), metavar="NAME", help=" | ".join(SOURCES))
    check.add_argument(
        "--play", type=int, metavar="N", help="also win N tasks of every split with the known solutions (0: all)"
    )
    check.add_argument("--split", nargs="+", metavar="SPLIT", help="play only these (default: all that are here)")
    make = commands.add_parser("prepare", help="write a split's tasks as a prompt dataset (JSONL)")
    make.add_argument("env", choices=list(SOURCES), metavar="NAME", help=" | ".join(SOURCES))
    make.add_argument("--split", required=True, help="which tasks; a wrong name lists the right ones")
    make.add_argument("--out", type=Path, required=True, metavar="FILE", help="for --data.prompt_dataset")
    make.add_argument("--limit", type=int, default=0, metavar="N", help="draw N of the tasks (default: all, in order)")
    make.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    make.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help='of the tasks, VALUE as JSON: depth=[2,3], distractors=5 (textcraft), types=["..."] (alfworld, webshop)',
    )
    for command in (check, make):
        command.add_argument("--data", default="", metavar="FOLDER", help="with the data, where some are needed")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``bipace-data``. Exits with 2 and one line on a bad argument, with 1 if data fail a check."""
    command = parser()
    args = command.parse_args(argv)
    try:
        {"list": _list, "verify": _verify, "prepare": _prepare}[args.command](args)
    except (ValueError, ImportError) as error:
        command.exit(2, f"{command.prog} {args.command}: error: {error}\n")


def _option(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{key}: got {value!r}, allowed: JSON") from None


def _list(args: argparse.Namespace) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for env, source in SOURCES.items():
        named = not source.folder or bool(folder_of(env))
        missing = [check for check in verify(env) if not check.ok] if named else []
        unusable = not named or any(check.fatal for check in missing)
        state = "NOT HERE" if unusable else "INCOMPLETE" if missing else "here"
        console.print(f"{env}: {state}", style="bold")
        rows = {"data": source.what, "from": source.origin, "licence": source.licence, "to get": source.get}
        if source.folder:
            rows["folder"] = folder_of(env) or f"none: put the data into $BIPACE_DATA/{env}, or name it with --data"
        for name, text in rows.items():
            console.print(f"  {name:8} {text}", soft_wrap=True)
        for check in missing:
            console.print(f"  missing  {check.name}: {check.found}", soft_wrap=True)


def _verify(args: argparse.Namespace) -> None:
    checks = verify(args.env, args.data)
    if args.play is not None and not checks[-1].fatal:
        checks += _play(args.env, folder_of(args.env, args.data), args.play, args.split)
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.found}")
    if not all(check.ok for check in checks):
        source = SOURCES[args.env]
        print(f"\n{args.env} needs {source.what}.\nFrom: {source.origin}\nLicence: {source.licence}\nDo: {source.get}")
        raise SystemExit(1)


def _play(env: str, data: str, limit: int, splits: list[str] | None) -> list[Check]:
    """Win tasks by their known solutions: of `splits`, or of every split that is here."""
    from tqdm import tqdm

    options = {"data": data} if data else {}
    player, out = envs.make(env, **options), []
    for split in splits or player.splits:
        try:
            tasks = type(player).tasks(split, **options)
        except ValueError:
            if splits:
                raise
            continue  # the split is not here, which `verify` has said
        chosen = tasks[:: -(-len(tasks) // limit)] if limit else tasks
        won = 0
        for task in tqdm(chosen, desc=split, unit="task"):
            player.reset(task)
            results = [player.step(command) for command in player.solution(task) or []]
            won += bool(results) and results[-1].success
        out.append(Check(f"{split}, won by the known solutions", won == len(chosen), f"{won} of {len(chosen)}"))
    player.close()
    return out


def _prepare(args: argparse.Namespace) -> None:
    data = folder_of(args.env, args.data)
    if SOURCES[args.env].folder and not data:
        raise ValueError(f"--data: got nothing, allowed: a folder with {SOURCES[args.env].what}")
    options = {"data": data} if data else {}
    try:
        tasks = envs.env_class(args.env).tasks(args.split, **options, **dict(args.option))
    except TypeError as error:
        if not args.option:
            raise
        raise ValueError(f"--option {', '.join(key for key, _ in args.option)}: {error}") from None
    if not 0 <= args.limit <= len(tasks):
        raise ValueError(f"--limit: got {args.limit}, allowed: 0 (all) to {len(tasks)}")
    if args.limit:
        tasks = random.Random(args.seed).sample(tasks, args.limit)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_tasks(args.out, tasks)
    env = envs.make(args.env, **options)
    kinds = Counter(env.task_type(task) for task in tasks)
    print(f"{args.out}: {len(tasks)} tasks (" + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) + ")")
    print(f"train with: --data.prompt_dataset {args.out} --data.label_key label --agent.env {args.env}", end="")
    print(f" --agent.data {data}" if data else "")


if __name__ == "__main__":
    main()
