"""The study's two figures, from the collected runs alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_bipace.lab.compare.collect import Curve
from openrlhf_bipace.lab.compare.page import answers, stratum
from openrlhf_bipace.lab.compare.statistics import mean
from openrlhf_bipace.lab.figures import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("compare_curves.png", "compare_differences.png")
COLOURS = {
    "grpo": "#6B6B6B", "one_v": "#56B4E9", "gigpo": "#CC79A7", "bigpo": "#0072B2", "bipace_q": "#D55E00",
    "bipace_q_prompt_end": "#E69F00", "bipace_eb": "#009E73", "bipace_hgpo": "#8C564B",
}  # fmt: skip


def draw(curves: Sequence[Curve], folder: Path) -> None:
    """Write every figure of `NAMES` into `folder`."""
    pairs = list(dict.fromkeys((c.engine, c.setting) for c in curves))
    panels = [[c for c in curves if (c.engine, c.setting) == pair] for pair in pairs]
    paints = zip(NAMES, (_curves, _differences), strict=True)
    save(folder, {name: partial(paint, panels=panels) for name, paint in paints})


def _curves(figure: Figure, panels: Sequence[Sequence[Curve]]) -> None:
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure.set_size_inches(4.6 * columns, 3.8 * rows)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
    for ax in axes[len(panels) :]:
        ax.remove()
    for ax, own in zip(axes, panels, strict=False):
        for arm, colour in COLOURS.items():
            runs = [c for c in own if c.arm == arm]
            if not runs:
                continue
            x = [iteration for iteration, _ in runs[0].held_out]
            bands = [mean({c.seed: dict(c.held_out)[i] for c in runs}, stratum) for i in x]
            ax.plot(x, [b.value for b in bands], color=colour, linewidth=1.8, label=f"{arm} ({len(runs)})")
            ax.fill_between(x, [b.low for b in bands], [b.high for b in bands], color=colour, alpha=0.12, linewidth=0)
        ax.set(title=_title(own), xlabel="iteration", ylim=(0, 1))
        ax.legend(loc="upper left", ncols=2)
    figure.supylabel("success in evaluation, mean over seeds, 95 % interval", fontsize=9)


def _differences(figure: Figure, panels: Sequence[Sequence[Curve]]) -> None:
    asked = [(own, answers(own, own[0].engine, own[0].setting)) for own in panels]
    panels, found = zip(*([(own, part) for own, part in asked if part] or asked), strict=True)
    figure.set_size_inches(9, 1.2 + 0.3 * sum(map(len, found)) + 0.5 * len(panels))
    rows = [max(len(part), 1) for part in found]
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    for ax, own, part in zip(axes, panels, found, strict=True):
        for place, (_, _, gap, _, p) in enumerate(reversed(part)):
            colour = "#0072B2" if p < 0.05 and gap.value > 0 else "#D55E00" if p < 0.05 else "#888888"
            ax.plot([gap.low, gap.high], [place, place], color=colour, linewidth=2)
            ax.plot(gap.value, place, "o", color=colour, markersize=5)
        ax.axvline(0, color="#444444", linewidth=0.8)
        labels = [f"{q.a} - {q.b} ({seeds})" for q, seeds, *_ in reversed(part)]
        ax.set(title=_title(own), yticks=range(len(part)), yticklabels=labels, ylim=(-0.6, len(part) - 0.4))
        ax.grid(axis="y", visible=False)
    axes[-1].set_xlabel("paired difference in area under the learning curve, 95 % interval (coloured: p < 0.05, Holm)")


def _title(own: Sequence[Curve]) -> str:
    return f"{own[0].setting}, engine {own[0].engine}"
