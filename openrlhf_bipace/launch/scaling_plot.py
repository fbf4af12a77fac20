"""scaling.png: throughput over nodes against the ideal, and where an iteration's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_bipace.report.plot import COLOURS, STYLE

if TYPE_CHECKING:
    from openrlhf_bipace.launch.scaling import Cell

PHASES = ("generation", "make_experience", "ppo_train", "broadcast")  # of metrics.jsonl's timing/*


def draw(measured: list[Cell], path: Path) -> None:
    """Draw the measured cells into the PNG at `path`."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _throughput(left, measured)
        _phases(right, measured)
        figure.savefig(path)


def _throughput(axes: Any, measured: list[Cell]) -> None:
    """One line per estimator and batch (strong), one dashed per estimator and batch per node (weak)."""
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in measured:
        lines.setdefault((cell.estimator, f"batch {cell.batch}"), []).append(cell)
        lines.setdefault((cell.estimator, f"batch {cell.batch / cell.nodes:g} per node"), []).append(cell)
    several = {key: members for key, members in lines.items() if len(members) > 1}
    shown = several or {(c.estimator, f"batch {c.batch}"): [c] for c in measured}
    for i, ((estimator, batch), members) in enumerate(shown.items()):
        x, y = [c.nodes for c in members], [c.figures["tokens_per_s"] for c in members]
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(x, y, "o-" if "per node" not in batch else "s--", color=colour, label=f"{estimator}, {batch}")
        axes.plot(x, [y[0] * n / x[0] for n in x], ":", color=colour, linewidth=1)
    ticks = sorted({cell.nodes for cell in measured})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks], minor=False)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(title="Response tokens per second (dotted: ideal)", xlabel="nodes")
    axes.legend()


def _phases(axes: Any, measured: list[Cell]) -> None:
    names = [cell.name for cell in measured]
    bottom = [0.0] * len(measured)
    for phase, colour in zip(PHASES, COLOURS, strict=False):
        values = [cell.figures[f"{phase}_s"] for cell in measured]
        axes.barh(names, values, left=bottom, color=colour, label=phase)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axes.invert_yaxis()
    axes.set(title="Seconds per iteration", xlabel="seconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=len(PHASES))
