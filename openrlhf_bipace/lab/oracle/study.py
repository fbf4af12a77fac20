"""``bipace-study oracle``: every estimator against the exact truth; writes tables and figures."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from openrlhf_bipace.lab.oracle.size import QUICK, Size
from openrlhf_bipace.lab.parallel import pool
from openrlhf_bipace.lab.provenance import commit

if TYPE_CHECKING:
    from openrlhf_bipace.lab.oracle.setting import Result

T = TypeVar("T")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The study's flags."""
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for tables and figures")
    parser.add_argument("--resamples", type=int, default=Size().resamples, help="batches of rollouts per setting")
    parser.add_argument("--tasks", type=int, default=Size().tasks, help="tasks per batch (the trained models: half)")
    parser.add_argument("--seed", type=int, default=0, help="of the rollouts, the models and their demonstrations")
    parser.add_argument("--workers", type=int, default=2, help="processes; the results do not depend on it")
    parser.add_argument("--quick", action="store_true", help="a tiny version that only shows that it runs")
    parser.add_argument("--no-models", action="store_true", help="leave out the trained models (no transformers)")


def run(args: argparse.Namespace) -> None:
    """Run the study and write ``oracle.csv``, ``oracle_choices.csv``, ``oracle.md`` and figures into ``--out``.

    Raises ValueError naming a bad flag.
    """
    from openrlhf_bipace.lab.oracle import figures, tables

    for flag, low in (("resamples", 3), ("tasks", 2), ("workers", 1)):
        if getattr(args, flag) < low:
            raise ValueError(f"--{flag}: got {getattr(args, flag)}, allowed: {low} or more")
    source = commit()  # before it may change: the study takes minutes
    size = QUICK if args.quick else Size(args.tasks, args.tasks // 2, args.resamples)
    results = compute(size, args.seed, args.workers, with_models=not args.no_models)
    write(args.out, results, tables.markdown(results, size, args.seed, source))
    print(f"{args.out}: oracle.md, oracle.csv, oracle_choices.csv and {len(figures.NAMES)} figures")


def write(out: Path, results: list[Result], page: str) -> None:
    """Every table and figure of `results` into the folder `out`, and the markdown `page`."""
    from openrlhf_bipace.lab.oracle import figures, tables

    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "oracle.csv", tables.rows(results))
    write_csv(out / "oracle_choices.csv", tables.differences(results))
    (out / "oracle.md").write_text(page, encoding="utf-8")
    figures.draw(results, out)


def compute(size: Size, seed: int, workers: int, *, with_models: bool = True) -> list[Result]:
    """The `Result` of every arm in every setting, in the order of `plan.settings`."""
    from openrlhf_bipace.lab.oracle import plan, setting

    with pool(workers) as mapped:
        wanted = plan.models(size, seed) if with_models else {}
        trained = dict(zip(wanted, mapped(_call, list(wanted.values()), "models"), strict=True))
        found = mapped(setting.run, plan.settings(size, seed, trained), "settings")
    return [result for results in found for result in results]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows of equal or unequal columns, in order of first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _call(function: Callable[[], T]) -> T:
    return function()
