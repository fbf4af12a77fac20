"""The study's figures, from its results alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf_bipace.lab.figures import save
from openrlhf_bipace.lab.oracle import arms
from openrlhf_bipace.lab.oracle.arms import TRUE_A, Arm, arm
from openrlhf_bipace.lab.oracle.setting import Result
from openrlhf_bipace.lab.oracle.tables import find

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = ("oracle_error.png", "oracle_gradient.png", "oracle_epsilon.png", "oracle_sweeps.png")
COLOURS = {"bigpo": "#0072B2", "bipace_q": "#D55E00", "bipace_diff": "#009E73", "bipace_hgpo": "#1A1A1A"}
SWEPT = {
    "grpo": "#6B6B6B", "gigpo": "#CC79A7", "one_v": "#56B4E9", "bigpo": "#0072B2", "bipace_q": "#D55E00",
    "bipace_diff": "#009E73", "bipace_hgpo": "#1A1A1A",
}  # fmt: skip
KINDS = {"action": ("action only", "#0072B2", "o"), "free": ("free reasoning", "#E69F00", "s"),
         "plan": ("reasoning that plans the action", "#D55E00", "D")}  # fmt: skip


def draw(results: Sequence[Result], folder: Path) -> None:
    """Write every figure of `NAMES` into `folder`."""
    paints = zip(NAMES, (_error, _gradient, _epsilon, _sweeps), strict=True)
    save(folder, {name: partial(paint, results=results) for name, paint in paints})


def _error(figure: Figure, results: Sequence[Result]) -> None:
    figure.set_size_inches(9, 6)
    axes = figure.subplots()
    base = results[0].name
    found = [r for one in arms.MAIN if (r := find(results, base, one)) and "mse" in r.measures]
    found = [r for r in found if r.arm.estimator not in (TRUE_A,)]
    left = [0.0] * len(found)
    shared = [_value(r, "bias2") - _value(r, "bias2_action") for r in found]
    shares = {
        "bias², the same for every action of a state": (shared, "#56B4E9"),
        "bias² that depends on the action": ([_value(r, "bias2_action") for r in found], "#D55E00"),
        "variance": ([_value(r, "variance") for r in found], "#BBBBBB"),
    }
    places = range(len(found))
    for label, (widths, colour) in shares.items():
        widths = [max(width, 0.0) for width in widths]
        axes.barh(places, widths, left=left, color=colour, label=label, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(1, color="#1A1A1A", linewidth=1, linestyle="--", label="all zeros")
    axes.set_yticks(places, [r.arm.label for r in found])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("mean squared error of the step part, in mean squares of the true advantage")
    axes.set_title(f"Error of the step part ({_words(base)})")
    _legend(figure, axes)


def _gradient(figure: Figure, results: Sequence[Result]) -> None:
    figure.set_size_inches(9, 6.6)
    left, right = figure.subplots(1, 2, sharey=True)
    base = results[0].name
    found = [r for one in arms.MAIN if (r := find(results, base, one))]
    for axes, part, title in ((left, "step", "step part alone"), (right, "total", "with the episode part, w = 1")):
        for offset, (kind, (label, colour, marker)) in zip((-0.22, 0, 0.22), KINDS.items(), strict=True):
            shown = [(i, r.measures[f"{part}_cos_{kind}"]) for i, r in enumerate(found)
                     if f"{part}_cos_{kind}" in r.measures]  # fmt: skip
            axes.errorbar([m.value for _, m in shown], [i + offset for i, _ in shown],
                          xerr=[m.half_width for _, m in shown], fmt=marker, color=colour, markersize=4, label=label,
                          linewidth=1.2)  # fmt: skip
        axes.set_title(title)
        axes.set_xlim(0, 1)
        axes.set_xlabel("cosine with the exact policy gradient")
    left.set_yticks(range(len(found)), [r.arm.label for r in found])
    left.invert_yaxis()
    _legend(figure, right)
    figure.suptitle(f"Policy gradients ({_words(base)})", x=0.01, ha="left")


def _epsilon(figure: Figure, results: Sequence[Result]) -> None:
    names = []
    for result in results:
        if any(k == "epsilon" and v != "auto" for k, v in result.arm.options) and result.name not in names:
            names.append(result.name)
    figure.set_size_inches(3 * len(names), 5.6)
    top, bottom = figure.subplots(2, len(names), sharey="row", squeeze=False)
    for name, upper, lower in zip(names, top, bottom, strict=True):
        kind = _kind(results, name)
        upper.set_title(f"{name['policy']},\n{name['hidden_state']}")
        for one in arms.SCANNED:
            scanned = [r for r in results if r.name == name and _base_of(r.arm) == one]
            scanned = sorted((r for r in scanned if "step_corr" in r.measures), key=lambda r: r.epsilon)
            for axes, measure in ((upper, "step_corr"), (lower, f"step_cos_{kind}")):
                _line(axes, [(r.epsilon, r.measures[measure]) for r in scanned], COLOURS[one.label], one.label)
            if one == arms.SCANNED[0]:
                r2 = [(r.epsilon, r.described["r2"]) for r in scanned]
                upper.plot(*zip(*r2, strict=True), color="#6B6B6B", linestyle=":", label="leave-one-out R²")
        lower.set_xlabel("ε (cosine distance)")
        for axes in (upper, lower):
            axes.set_xscale("log")
    top[0].set_ylabel("correlation with the true advantage")
    bottom[0].set_ylabel("cosine with the exact gradient\n(with a plan where there is one)")
    _legend(figure, top[0])


def _sweeps(figure: Figure, results: Sequence[Result]) -> None:
    figure.set_size_inches(9, 6)
    grid = figure.subplots(2, 2, sharey="row")
    base = results[0].name
    held_groups, held_texts = f"G = {base['groups']}", f"{base['texts_per_state']} texts per state"
    swept = (
        ("groups", "G, rollouts per task", held_texts),
        ("texts_per_state", "texts per state", held_groups),
    )
    for column, (name, words, held) in enumerate(swept):
        same = [k for k in base if k != name]
        for row, kind in enumerate(("action", "plan")):
            axes = grid[row][column]
            for estimator, colour in SWEPT.items():
                part = "total" if estimator == "grpo" else "step"
                found = [r for r in results if r.arm == arm(estimator) and all(r.name[k] == base[k] for k in same)]
                found.sort(key=lambda r: r.name[name])
                points = [(r.name[name], r.measures[f"{part}_cos_{kind}"]) for r in found
                          if f"{part}_cos_{kind}" in r.measures]  # fmt: skip
                _line(axes, points, colour, estimator)
            axes.set_xscale("log", base=2)
            values = sorted({r.name[name] for r in results if all(r.name[k] == base[k] for k in same)})
            axes.set_xticks(values, map(str, values))
            axes.set_title(KINDS[kind][0])
            axes.set_xlabel(f"{words} ({held})")
        grid[0][0].set_ylabel("cosine with the exact gradient")
        grid[1][0].set_ylabel("cosine with the exact gradient")
    _legend(figure, grid[0][0])


def _legend(figure: Figure, axes: Axes) -> None:
    """Of `axes`, below all axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _line(axes: Axes, points: list, colour: str, label: str) -> None:
    if not points:
        return
    x, y = [p for p, _ in points], [m.value for _, m in points]
    axes.plot(x, y, color=colour, marker="o", markersize=3, label=label)
    half = [m.half_width for _, m in points]
    axes.fill_between(
        x, [a - b for a, b in zip(y, half, strict=True)], [a + b for a, b in zip(y, half, strict=True)],
        color=colour, alpha=0.15, linewidth=0,
    )  # fmt: skip


def _base_of(one: Arm) -> Arm | None:
    """The arm that `one` is at another epsilon; None for an arm that sets none."""
    options = dict(one.options)
    if options.pop("epsilon", "auto") == "auto":
        return None
    return arm(one.estimator, **options)


def _kind(results: Sequence[Result], name: dict[str, Any]) -> str:
    measures = next(r.measures for r in results if r.name == name)
    return "plan" if "total_cos_plan" in measures else "action"


def _value(result: Result, measure: str) -> float:
    return result.measures[measure].value


def _words(name: dict[str, Any]) -> str:
    return f"{name['policy']}, G = {name['groups']}, {name['texts_per_state']} texts per state"
