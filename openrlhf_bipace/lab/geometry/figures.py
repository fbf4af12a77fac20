"""The study's figures, from its rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_bipace.lab.figures import save
from openrlhf_bipace.lab.geometry.page import main_layer
from openrlhf_bipace.lab.geometry.tables import NGRAM, Row, setting_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POSITIONS = {"prompt_end": "last prompt token", "action_start": "before the action"}
PLAYERS = {"solver": "#0072B2", "random": "#E69F00", "model": "#009E73"}
PAIRS = {"same_new_text": ("one state, different texts", "#0072B2"), "different": ("two states", "#D55E00")}
CURVES = {
    "purity": ("purity", "#0072B2"),
    "completeness": ("completeness", "#009E73"),
    "cluster_singleton_rate": ("singletons, of clusters", "#E69F00"),
    "giant_share": ("largest cluster / group", "#6B6B6B"),
    "r2": ("leave-one-out R²", "#D55E00"),
}
TRIMMED = 1e-4  # cosine distances below are drawn here: the axis is logarithmic


def draw(rows: Sequence[Row], folder: Path) -> list[str]:
    """Write every figure into `folder`; their names."""
    paints = {"geometry_distances.png": _distances, "geometry_auc.png": _auc, "geometry_epsilon.png": _epsilon}
    return save(folder, {name: partial(paint, rows=rows) for name, paint in paints.items()})


def _worlds(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """(environment, model, context) -> its rows."""
    out: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        out.setdefault(setting_of(row)[:3], []).append(row)
    return out


def _main(rows: Sequence[Row]) -> list[Row]:
    """The rows of one world's solver that thinks, or of whatever setting it has instead."""
    settings = list(dict.fromkeys(setting_of(row)[3:] for row in rows))
    chosen = ("solver", "think") if ("solver", "think") in settings else settings[0]
    return [row for row in rows if setting_of(row)[3:] == chosen]


def _grid(figure: Figure, rows: Sequence[Row], heights: float) -> list[tuple[list[Row], str, Axes]]:
    """A panel per world (columns) and position (rows): (the world's rows, position, axes)."""
    worlds = _worlds(rows)
    positions = [name for name in POSITIONS if any(row.get("position") == name for row in rows)]
    figure.set_size_inches(max(2.8 * len(worlds), 6), heights * len(positions) + 0.8)
    grid = figure.subplots(len(positions), len(worlds), squeeze=False, sharey=True)
    panels = []
    for column, (world, own) in enumerate(worlds.items()):
        for line, position in enumerate(positions):
            axes = grid[line][column]
            axes.set_title(
                (f"{world[0]}, {world[1]},\n{world[2]} context\n" if not line else "") + POSITIONS[position]
            )
            panels.append((own, position, axes))
    return panels


def _distances(figure: Figure, rows: Sequence[Row]) -> None:
    panels = _grid(figure, rows, 2.2)
    for own, position, axes in panels:
        found = _of(_main(own), "vectors", position)
        for name, (label, colour) in PAIRS.items():
            shown = [row for row in found if f"distance_{name}_p50" in row]
            x = [int(row["layer"]) for row in shown]
            low, middle, high = ([max(float(row[f"distance_{name}_p{q}"]), TRIMMED) for row in shown]
                                 for q in (10, 50, 90))  # fmt: skip
            axes.plot(x, middle, color=colour, marker="o", markersize=3, label=f"{label}: median, P10 to P90")
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.set_yscale("log")
        _layers(axes, found)
    _finish(figure, panels, "cosine distance")


def _auc(figure: Figure, rows: Sequence[Row]) -> None:
    panels = _grid(figure, rows, 2.2)
    for own, position, axes in panels:
        for player, responses in dict.fromkeys(setting_of(row)[3:] for row in own):
            found = [row for row in _of(own, "vectors", position) if setting_of(row)[3:] == (player, responses)]
            if responses == "action":
                continue
            for name, style, label in (("auc", "-", player), ("auc_new_text", ":", f"{player}, different texts")):
                shown = [row for row in found if name in row]
                if not shown:
                    continue
                axes.plot([int(row["layer"]) for row in shown], [float(row[name]) for row in shown], style,
                          color=PLAYERS[player], marker="o", markersize=3, label=label)  # fmt: skip
        words = _of(_main(own), "vectors", NGRAM)
        if words and "auc_new_text" in words[0]:
            axes.axhline(float(words[0]["auc_new_text"]), color="#6B6B6B", linestyle="--",
                         label="solver, different texts: by their words")  # fmt: skip
        axes.axhline(0.5, color="#1A1A1A", linewidth=0.8)
        _layers(axes, _of(own, "vectors", position))
    _finish(figure, panels, "AUC, one state against two")


def _epsilon(figure: Figure, rows: Sequence[Row]) -> None:
    panels = _grid(figure, rows, 2.4)
    for own, position, axes in panels:
        shown = _main(own)
        layer = main_layer(shown)
        found = [row for row in _of(shown, "hidden", position) if row["layer"] == layer]
        for name, (label, colour) in CURVES.items():
            points = [(float(row["epsilon"]), float(row[name])) for row in found if float(row["epsilon"]) > 0]
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=label)
        auto = next(row for row in _of(shown, "vectors", position) if row["layer"] == layer)
        axes.axvline(float(auto["auto_epsilon"]), color="#1A1A1A", linestyle=":", label="ε that auto would choose")
        axes.set_xscale("log")
        axes.set_ylim(-0.1, 1.03)
        axes.set_xlabel(f"ε, layer {layer}")
    _finish(figure, panels, "share, or R²")


def _of(rows: Sequence[Row], kind: str, position: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind and row.get("position") == position]


def _layers(axes: Axes, rows: Sequence[Row]) -> None:
    ticks = sorted({int(row["layer"]) for row in rows})
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xlabel("layer")


def _finish(figure: Figure, panels: Sequence[tuple[list[Row], str, Axes]], label: str) -> None:
    """Name the first column's axes and put one legend of everything drawn below all panels."""
    found = {}
    for _, _, axes in panels:
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel(label)
        found |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    columns = 2 if max(map(len, found)) > 30 else 3
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)
