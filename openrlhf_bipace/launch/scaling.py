"""``bipace-study scaling``: one job per node count, batch size and estimator, and what they tell about scaling.

Strong scaling compares node counts at the same batch, weak scaling at the same batch per node; both against the
smallest node count that was measured. Throughput counts the response tokens of the iterations after the warm-up.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from openrlhf_bipace.launch import cells
from openrlhf_bipace.launch.cells import State, Study
from openrlhf_bipace.launch.scaling_plot import PHASES, draw
from openrlhf_bipace.report.load import Line, load

COLUMNS = (
    "nodes", "batch", "estimator", "state", "iterations", "tokens_per_s", "steps_per_s", "step_s",
    *(f"{phase}_s" for phase in PHASES), "strong_efficiency", "weak_efficiency", "reason",
)  # fmt: skip
PLAN = "plan.csv"


@dataclass(slots=True)
class Cell:
    """One run of the study and, once collected, its figures (seconds are means per iteration)."""

    nodes: int
    batch: int  # prompts per iteration
    estimator: str
    state: str = "missing"
    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)  # by the names in COLUMNS

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"n{self.nodes}-b{self.batch}-{self.estimator}"

    def row(self) -> dict[str, object]:
        """A line of the table; what was not measured is empty."""
        own = {name: getattr(self, name) for name in ("nodes", "batch", "estimator", "state", "reason")}
        return {name: own.get(name, self.figures.get(name, "")) for name in COLUMNS}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of ``bipace-study scaling``."""
    cells.add_flags(parser)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4], help="node counts")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[16], help="prompts per iteration")
    parser.add_argument(
        "--weak", action="store_true", help="--batch_sizes are per node (weak scaling), not in total (strong scaling)"
    )
    parser.add_argument("--estimators", nargs="+", default=["bipace_q"], help="advantage estimators")
    parser.add_argument("--samples", type=int, default=8, help="rollouts per prompt")
    parser.add_argument("--updates", type=int, default=2, help="policy updates per iteration")
    parser.add_argument("--iterations", type=int, default=8, help="iterations per run")
    parser.add_argument("--warmup", type=int, default=2, help="first iterations left out of every figure")


def run(args: argparse.Namespace) -> None:
    """Submit what is missing, or with --report write scaling.csv, scaling.png and report.md."""
    study = Study(args)
    if args.report:
        print(report(study, args.warmup))
        return
    if args.iterations <= args.warmup:
        raise ValueError(f"--iterations: got {args.iterations}, allowed: more than --warmup {args.warmup}")
    planned = plan(args)
    _write_csv(study.folder / PLAN, planned)
    states = study.states([cell.name for cell in planned])
    submitted = []
    for cell in tqdm([c for c in planned if states[c.name].open], desc="jobs", unit="job"):
        text = job(study, cell, args)
        if args.write_only:
            study.write(cell.name, text)
        else:
            submitted.append(study.submit(cell.name, text, {cell.name: ""}))
    study.report_after(submitted, states, "scaling", "--warmup", str(args.warmup))
    print(f"{len(planned)} runs planned in {study.folder}; {_count(states)}; {len(submitted)} submitted now")


def plan(args: argparse.Namespace) -> list[Cell]:
    """Every combination, small jobs first."""
    return [
        Cell(nodes, batch * nodes if args.weak else batch, estimator)
        for nodes in sorted(set(args.nodes))
        for batch in args.batch_sizes
        for estimator in args.estimators
    ]


def job(study: Study, cell: Cell, args: argparse.Namespace) -> str:
    """The sbatch text of one cell."""
    changes = {"job-name": cell.name, "nodes": str(cell.nodes), "output": study.log(cell.name)}
    flags = {
        "algo.advantage.estimator": cell.estimator,
        "rollout.batch_size": cell.batch,
        "rollout.n_samples_per_prompt": args.samples,
        "train.batch_size": cell.batch * args.samples // args.updates,
        "data.max_samples": cell.batch * args.iterations,
        "train.num_episodes": 1,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return study.script.one(changes, str(study.folder / cell.name), [*words, *study.flags])


def report(study: Study, warmup: int) -> str:
    """Collect every planned cell, write the table, the figure and report.md; the table as text."""
    found = collect(study, warmup)
    _write_csv(study.folder / "scaling.csv", found)
    measured = [cell for cell in found if cell.figures]
    lines = ["# Scaling", "", f"Means over the iterations after the first {warmup}. {_count_cells(found)}.", ""]
    table = _markdown(found)
    lines += [table, "", "Strong efficiency: tokens/s per node against the smallest node count at the same batch."]
    lines += ["Weak efficiency: the same at the same batch per node.", ""]
    if measured:
        draw(measured, study.folder / "scaling.png")
        lines += ["![scaling](scaling.png)", ""]
    (study.folder / "report.md").write_text("\n".join(lines))
    return f"{table}\nWritten: {study.folder}/report.md, scaling.csv" + (", scaling.png" if measured else "")


def collect(study: Study, warmup: int) -> list[Cell]:
    """Every planned cell with its state and, where it ran past the warm-up, its figures."""
    plan_file = study.folder / PLAN
    if not plan_file.exists():
        raise ValueError(f"--out: got {str(study.folder)!r}, allowed with --report: a study's folder (no {PLAN})")
    with plan_file.open(newline="") as file:
        found = [Cell(int(row["nodes"]), int(row["batch"]), row["estimator"]) for row in csv.DictReader(file)]
    states = study.states([cell.name for cell in found])
    for cell in found:
        cell.state, cell.reason = states[cell.name].word, states[cell.name].reason
        if cell.state == "finished":
            cell.figures = figures(load(study.folder / cell.name).training, warmup)
            cell.reason = "" if cell.figures else f"not one iteration after the warm-up of {warmup}"
    add_efficiencies([cell for cell in found if cell.figures])
    return found


def figures(lines: list[Line], warmup: int) -> dict[str, float]:
    """Throughput and phase times of the iterations after the warm-up; empty if there are none."""
    timed = lines[warmup:]
    if not timed:
        return {}
    seconds = sum(line["timing/step_total"] for line in timed)
    out = {f"{phase}_s": sum(line[f"timing/{phase}"] for line in timed) / len(timed) for phase in PHASES}
    return out | {
        "iterations": len(timed),
        "tokens_per_s": sum(tokens(line) for line in timed) / seconds,
        "steps_per_s": len(timed) / seconds,
        "step_s": seconds / len(timed),
    }


def tokens(line: Line) -> float:
    """Response tokens that one iteration generated."""
    sound = line["agent/trajectories"] - line["agent/failed"]
    return sound * line.get("agent/turns", 0.0) * line.get("agent/response_tokens", 0.0)


def add_efficiencies(measured: list[Cell]) -> None:
    """Tokens/s per node over that of the smallest node count with the same batch (strong) or batch per node (weak)."""
    for name, comparable in (
        ("strong_efficiency", lambda a, b: a.batch == b.batch),
        ("weak_efficiency", lambda a, b: a.batch * b.nodes == b.batch * a.nodes),
    ):
        for cell in measured:
            peers = [c for c in measured if c.estimator == cell.estimator and comparable(c, cell)]
            base = min(peers, key=lambda c: c.nodes)
            if len(peers) > 1:
                cell.figures[name] = _per_node(cell) / _per_node(base)


def _per_node(cell: Cell) -> float:
    return cell.figures["tokens_per_s"] / cell.nodes


def _write_csv(path: Path, rows: list[Cell]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(cell.row() for cell in rows)


def _markdown(rows: list[Cell]) -> str:
    def show(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join(head + ["| " + " | ".join(map(show, cell.row().values())) + " |" for cell in rows])


def _count(states: dict[str, State]) -> str:
    words = [state.word for state in states.values()]
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def _count_cells(found: list[Cell]) -> str:
    return _count({cell.name: State(cell.state) for cell in found})
