"""``bipace-doctor``: is the installation sound?  ``bipace-doctor env NAME``: does an environment keep its contract?"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

_MARKS = {True: "[green]ok[/]", False: "[bold red]FAULT[/]", None: "[yellow]-[/]"}


def parser() -> argparse.ArgumentParser:
    """The command line of ``bipace-doctor``."""
    out = argparse.ArgumentParser(prog="bipace-doctor", description="Check the installation, or an environment.")
    commands = out.add_subparsers(dest="what", metavar="WHAT")
    env = commands.add_parser(
        "env",
        help="play an environment and check its contract",
        description="Play random and scripted episodes and report faults, determinism, speed and memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    env.add_argument("name", metavar="NAME", help="a registered environment or path/to/file.py:ClassName")
    env.add_argument("--data", default="", metavar="FOLDER", help="the environment's data, where it needs a folder")
    env.add_argument("--split", default="train", help="whose tasks to play")
    env.add_argument("--episodes", type=int, default=10, help="episodes to play, spread over the split")
    env.add_argument("--seed", type=int, default=0, help="of the random commands")
    env.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for one reset or step")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``bipace-doctor``. Exits with 1 when something is at fault, with 2 and one line on a bad flag."""
    command = parser()
    args = command.parse_args(argv)
    if args.what is None:
        from openrlhf_bipace.integration.checkup import check_installation

        raise SystemExit(_show("installation", check_installation()))
    if args.episodes < 1:
        command.exit(2, f"{command.prog}: error: --episodes: got {args.episodes}, allowed: 1 or more\n")
    raise SystemExit(_show(args.name, _examine(args, command)))


def _examine(args: argparse.Namespace, command: argparse.ArgumentParser) -> Iterable[tuple[str, bool | None, str]]:
    from openrlhf_bipace.evaluation.checker import Patient, examine

    options: dict[str, Any] = {"data": args.data} if args.data else {}
    patient = Patient(args.name, options, args.split, args.episodes, args.seed, args.timeout)
    try:
        patient.cls  # noqa: B018 (an unknown name ends here)
    except ValueError as error:
        command.exit(2, f"{command.prog}: error: {error}\n")
    return ((f.check, f.ok, f.remark) for f in examine(patient))


def _show(subject: str, findings: Iterable[tuple[str, bool | None, str]]) -> int:
    """Print the findings as they come; 1 if one is a fault, else 0."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=escape(subject), title_justify="left")
    for column in ("check", "", "remark"):
        table.add_column(column, overflow="fold")
    faults = 0
    with console.status("") as status:
        status.update("checking ...")
        for check, ok, remark in findings:
            status.update(f"checked {check} ...")
            table.add_row(check, _MARKS[ok], escape(remark))
            faults += ok is False
    console.print(table)
    console.print(f"{faults} at fault" if faults else "nothing at fault")
    return int(faults > 0)


if __name__ == "__main__":
    main()
