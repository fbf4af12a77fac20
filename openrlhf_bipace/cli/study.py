"""``bipace-study NAME``: the studies behind the numbers in docs/, each rerun by one command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Collection, Sequence

# name -> (module with `add_flags(parser)` and `run(args)`, what it answers). To add a study, add a line.
STUDIES: dict[str, tuple[str, str]] = {
    "oracle": ("openrlhf_bipace.lab.oracle.study", "How wrong is each estimator where the truth is known?"),
    "geometry": (
        "openrlhf_bipace.lab.geometry.study",
        "Do a model's hidden states tell the environment's states apart?",
    ),
    "clustering": (
        "openrlhf_bipace.lab.clustering_study",
        "What would clustering cost, up to 10^8 steps?",
    ),
    "compare": ("openrlhf_bipace.lab.compare.study", "Which estimator learns faster, and how sure is that?"),
    "scaling": ("openrlhf_bipace.launch.scaling", "node counts x batch sizes x estimators on a SLURM cluster"),
    "seeds": ("openrlhf_bipace.launch.seeds", "seeds x estimators as job arrays on a SLURM cluster"),
}


def parser(wanted: Collection[str] = tuple(STUDIES)) -> argparse.ArgumentParser:
    """The command line of ``bipace-study`` with the flags of the studies `wanted`, whose modules it imports."""
    out = argparse.ArgumentParser(prog="bipace-study", description="Reproduce a study of docs/, or run it larger.")
    commands = out.add_subparsers(dest="study", required=True, metavar="NAME")
    for name, (module, purpose) in STUDIES.items():
        command = commands.add_parser(
            name, help=purpose, description=purpose, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.set_defaults(module=module)
        if name in wanted:
            importlib.import_module(module).add_flags(command)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``bipace-study``. Exits with 2 and one line on a bad flag."""
    argv = sys.argv[1:] if argv is None else argv
    command = parser(argv[:1])  # some studies take seconds to import, which --help should not
    args = command.parse_args(argv)
    try:
        importlib.import_module(args.module).run(args)
    except ValueError as error:
        command.exit(2, f"{command.prog} {args.study}: error: {error}\n")


if __name__ == "__main__":
    main()
