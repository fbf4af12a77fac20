"""``bipace-study compare``: estimators x seeds from the same warm starts; tables and figures of what came out."""

from __future__ import annotations

import argparse
from pathlib import Path

from openrlhf_bipace.lab.compare.arms import ARMS
from openrlhf_bipace.lab.compare.runs import prepare
from openrlhf_bipace.lab.compare.setting import QUICK, SETTINGS

ENGINES = ("lab", "full")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The study's flags."""
    parser.add_argument("--engine", choices=ENGINES, default="lab", help="one process of PyTorch, or bipace-train")
    parser.add_argument("--settings", nargs="+", choices=[*SETTINGS], default=[], metavar="SETTING",
        help=f"of {', '.join(SETTINGS)}; if none are given, all that are planned")  # fmt: skip
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[], metavar="ARM",
        help=f"of {', '.join(ARMS)}; if none are given, all that are planned")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=0, help="runs per arm (0: as planned)")
    parser.add_argument("--work", type=Path, default=Path("runs/compare"), help="runs; those finished are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for the tables and figures")
    parser.add_argument("--workers", type=int, default=2, help="processes of the lab engine")
    parser.add_argument("--quick", action="store_true", help="a tiny version that only shows that it runs")
    parser.add_argument("--draw", action="store_true", help="run nothing: rebuild page and figures from compare.csv")
    parser.add_argument("--collect", action="store_true", help="run nothing: compare.csv from the finished runs first")


def run(args: argparse.Namespace) -> None:
    """Run what is missing, then write ``compare.csv``, ``compare.md`` and figures into ``--out``.

    Raises ValueError naming a bad flag.
    """
    from openrlhf_bipace.lab.compare import collect

    file = args.out / collect.FILE
    if not args.draw:
        if not args.collect:
            execute(args)
        curves = collect.collect(args.work)
        if not curves:
            raise ValueError(f"--work: got {str(args.work)!r}, allowed: a folder with finished runs")
        args.out.mkdir(parents=True, exist_ok=True)
        collect.write(curves, file)
    elif not file.exists():
        raise ValueError(f"--out: got {str(args.out)!r}, allowed with --draw: a folder with {collect.FILE}")
    curves = draw(args.out)
    print(f"{args.out}: {collect.FILE} ({curves} runs), compare.md and figures")


def draw(out: Path) -> int:
    """Page and figures of compare.csv in the folder `out`; the number of runs."""
    from openrlhf_bipace.lab.compare import collect, figures, page

    curves = collect.read(out / collect.FILE)
    (out / "compare.md").write_text(page.markdown(curves), encoding="utf-8")
    figures.draw(curves, out)
    return len(curves)


def execute(args: argparse.Namespace) -> None:
    """Make the warm starts and train every planned run that is not finished."""
    from openrlhf_bipace.lab.compare import full, plan, runs
    from openrlhf_bipace.lab.parallel import pool

    if args.workers < 1:
        raise ValueError(f"--workers: got {args.workers}, allowed: 1 or more")
    if args.seeds < 0:
        raise ValueError(f"--seeds: got {args.seeds}, allowed: 0 or more")
    changes = tuple(QUICK.items()) if args.quick else ()
    jobs = plan.jobs(str(args.work), args.engine, args.settings, args.arms, args.seeds, changes)
    if not jobs:
        raise ValueError(f"--settings, --arms: got nothing that is planned for --engine {args.engine}")
    jobs = [job for job in jobs if not runs.finished(job)]
    with pool(args.workers) as mapped:
        mapped(prepare, list({job.model: job for job in jobs}.values()), "warm starts")
        if args.engine == "lab":
            mapped(runs.train, jobs, "runs")
    if args.engine == "full":  # each takes every core
        from tqdm import tqdm

        for job in tqdm(jobs, desc="   runs"):
            full.train(job)
