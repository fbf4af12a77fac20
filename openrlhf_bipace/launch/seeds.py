"""``bipace-study seeds``: every estimator with every seed as one job array, and a report job once all have ended."""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

from openrlhf_bipace.launch import cells
from openrlhf_bipace.launch.cells import Study
from openrlhf_bipace.report.load import Run, load
from openrlhf_bipace.report.numbers import held_out
from openrlhf_bipace.report.plot import COLOURS, STYLE

COLUMNS = ("environment", "estimator", "seed", "iteration", "success")
PLAN = "plan.csv"


@dataclass(slots=True)
class Curve:
    """Success over the iterations of one run: held-out where it was evaluated, else of the training episodes."""

    environment: str
    estimator: str
    seed: int
    points: list[tuple[int, float]]

    @property
    def last(self) -> float:
        """Success at the end."""
        return self.points[-1][1]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of ``bipace-study seeds``."""
    cells.add_flags(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="values of --train.seed")
    parser.add_argument("--estimators", nargs="+", default=["grpo", "gigpo", "bipace_q"], help="advantage estimators")
    parser.add_argument("--nodes", type=int, default=1, help="nodes per run")
    parser.add_argument("--at_once", type=int, default=0, help="runs of the array at the same time (0: no limit)")


def run(args: argparse.Namespace) -> None:
    """Submit what is missing as one array, or with --report write seeds.csv, seeds.png and report.md."""
    study = Study(args)
    if args.report:
        print(report(study))
        return
    names = [f"{estimator}-seed{seed}" for estimator in args.estimators for seed in args.seeds]
    (study.folder / PLAN).write_text("\n".join(["cell", *names]) + "\n")
    states = study.states(names)
    todo = [i for i, name in enumerate(names) if states[name].open]
    submitted = []
    if todo:
        limit = f"%{args.at_once}" if args.at_once else ""
        changes = {
            "job-name": study.folder.name,
            "nodes": str(args.nodes),
            "output": study.log("%a-%A"),
            "array": ",".join(map(str, todo)) + limit,
        }
        text = study.script.array(changes, str(study.folder), names, study.flags)
        if args.write_only:
            study.write("array", text)
        else:
            submitted = [study.submit("array", text, {names[i]: f"_{i}" for i in todo})]
    study.report_after(submitted, states, "seeds")
    print(f"{len(names)} runs planned in {study.folder}, {len(todo) if submitted else 0} submitted now")


def report(study: Study) -> str:
    """Collect every planned run, write seeds.csv, seeds.png and report.md; the table as text."""
    plan = study.folder / PLAN
    if not plan.exists():
        raise ValueError(f"--out: got {str(study.folder)!r}, allowed with --report: a study's folder (no {PLAN})")
    names = plan.read_text().split()[1:]
    states = study.states(names)
    curves = [curve(load(study.folder / name)) for name in names if states[name].word == "finished"]
    curves = [c for c in curves if c.points]
    _write_csv(study.folder / "seeds.csv", curves)
    unfinished = {name: state for name, state in states.items() if state.word != "finished"}
    lines = ["# Seeds", "", f"{len(curves)} of {len(names)} runs finished.", "", table(curves), ""]
    lines += [f"- {name}: {state.word} {state.reason}".rstrip() for name, state in unfinished.items()]
    if curves:
        draw(curves, study.folder / "seeds.png")
        lines += ["", "![success](seeds.png)", ""]
    (study.folder / "report.md").write_text("\n".join(lines))
    return f"{table(curves)}\nWritten: {study.folder}/report.md, seeds.csv" + (", seeds.png" if curves else "")


def curve(run: Run) -> Curve:
    """The success curve of a run."""
    points = [(tested.step, tested.share) for tested in held_out(run)]
    if not points:
        points = [(int(line["step"]), line["agent/success"]) for line in run.training if "agent/success" in line]
    return Curve(str(run.flag("agent.env")), run.estimator, int(run.flag("train.seed")), points)


def table(curves: list[Curve]) -> str:
    """Last success per estimator over its seeds, as Markdown: mean, smallest and largest."""
    lines = ["| estimator | runs | mean of the last success | smallest | largest |", "|---|---|---|---|---|"]
    for estimator in dict.fromkeys(c.estimator for c in curves):
        last = [c.last for c in curves if c.estimator == estimator]
        mean = sum(last) / len(last)
        lines.append(f"| {estimator} | {len(last)} | {mean:.3f} | {min(last):.3f} | {max(last):.3f} |")
    return "\n".join(lines)


def draw(curves: list[Curve], path: Path) -> None:
    """Every run thin, the mean of an estimator's runs where all of them have a point thick, as a PNG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(7, 4.4), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for i, estimator in enumerate(dict.fromkeys(c.estimator for c in curves)):
            own = [c for c in curves if c.estimator == estimator]
            colour = COLOURS[i % len(COLOURS)]
            for c in own:
                axes.plot(*zip(*c.points, strict=True), color=colour, linewidth=0.8, alpha=0.4)
            steps = sorted(set.intersection(*(set(dict(c.points)) for c in own)))
            means = [sum(dict(c.points)[step] for c in own) / len(own) for step in steps]
            axes.plot(steps, means, color=colour, linewidth=2, label=f"{estimator} ({len(own)} seeds)")
        axes.set(title="Success by seed, and the mean", xlabel="iteration", ylabel="success", ylim=(0, 1))
        axes.legend()
        figure.savefig(path)


def _write_csv(path: Path, curves: list[Curve]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(
            (c.environment, c.estimator, c.seed, step, success) for c in curves for step, success in c.points
        )
