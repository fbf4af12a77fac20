"""The study's page: tables of its rows below whatever was written by hand above them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from openrlhf_bipace.advantages.diagnostics import PAPER
from openrlhf_bipace.lab.geometry.tables import SETTING, Row, setting_of

MARK = "<!-- Below: written by `bipace-study geometry`. Above: by hand, and kept. -->"
HEAD = "# Geometry of hidden states\n\nWhat was measured, and how to rerun it: [docs/geometry.md](../geometry.md).\n"
PAPERS = {"alfworld": "ALFWorld-7B", "textcraft": "TextCraft-7B"}  # environment -> its run in `PAPER`
RECIPES = (("-8", "0.1"), ("-12", "0.05"))  # (layer, epsilon) of the paper's 7B and 1.5B models

FIGURES = """\
![distances](geometry_distances.png)

Cosine distances inside a group, by layer: the solver's turns with thoughts. Below 0.0001 they are drawn at 0.0001.

![AUC](geometry_auc.png)

How often two turns of one state are nearer than two of two states, by layer and player (scripted ones with thoughts).

![epsilon](geometry_epsilon.png)

Partitions by ε: the solver's turns with thoughts."""
DATA = {
    "tasks": "tasks", "samples": "G", "max_turns": "turn limit", "turns": "turns", "turns_per_group": "per group",
    "success": "success", "parse_rate": "parsed", "accepted_rate": "accepted", "states": "states",
    "texts_per_state": "texts per state", "states_per_text": "states per text",
}  # fmt: skip
PARTITION = {
    "clusters": "clusters", "cluster_singleton_rate": "singletons, of clusters", "row_singleton_rate": "of turns",
    "cluster_size_mean": "mean size", "cluster_size_p90": "P90", "giant_share": "largest / group",
    "matched_pairs": "pairs", "purity": "purity", "completeness": "completeness",
    "return_std_within": "return std within", "r2": "R²",
}  # fmt: skip
VECTORS = {
    "anisotropy": "mean cosine", "distance_same_new_text_p50": "same state, other text",
    "distance_different_p10": "other state, P10", "distance_different_p50": "median", "auc": "AUC",
    "auc_new_text": "AUC, other text", "auc_turn": "AUC of the turn", "auc_trajectory": "of the trajectory",
    "auto_epsilon": "ε auto", "auto_r2": "R² there", "auto_refused": "refused",
}  # fmt: skip


def write(path: Path, rows: Sequence[Row]) -> None:
    """Put the tables of `rows`, as read from a file, below `MARK` in the page `path`, made if need be."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    head = old.partition(MARK)[0] if MARK in old else HEAD + "\n"
    path.write_text(f"{head}{MARK}\n\n{tables(rows)}", encoding="utf-8")


def tables(rows: Sequence[Row]) -> str:
    """Markdown: what was collected, then for every environment and model its partitions and vectors."""
    parts = ["## Figures", FIGURES, "## Turns", _data(rows)]
    for env, model, context in dict.fromkeys(setting_of(row)[:3] for row in rows):
        own = [row for row in rows if setting_of(row)[:3] == (env, model, context)]
        parts += [f"## `{env}`, {model}, {context} context", "Partitions:", _partitions(own, env)]
        parts += ["Vectors; cosine distances are medians unless said otherwise:", _vectors(own)]
    return "\n\n".join(parts) + "\n"


def _data(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["kind"] == "data"]
    lines = [[*setting_of(row), *_cells(row, DATA), row["seed"], row["commit"]] for row in found]
    machines = "; ".join(dict.fromkeys(row["machine"] for row in found))
    return f"{table([*SETTING, *DATA.values(), 'seed', 'commit'], lines)}\n\nMachine: {machines}."


def _partitions(rows: Sequence[Row], env: str) -> str:
    lines = []
    for player, responses in dict.fromkeys(setting_of(row)[3:] for row in rows):
        own = [row for row in rows if setting_of(row)[3:] == (player, responses)]
        lines += [[f"{player}, {responses}", name, *_cells(row, PARTITION)] for name, row in _chosen(own)]
    for name, values in PAPER.get(PAPERS.get(env, ""), {}).items():
        lines.append(["paper, 7B, training", name, *_cells({k: str(v) for k, v in values.items()}, PARTITION)])
    return table(["player, responses", "partition", *PARTITION.values()], lines)


def _chosen(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """(name, row) of the partitions worth a line, of one setting's rows."""
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("ngram", "hidden", "vectors")}
    out = [(row["kind"], row) for row in rows if row["kind"] in ("one", "observation")]
    if kinds["ngram"]:
        row = max(kinds["ngram"], key=lambda row: float(row["r2"]))
        out.append((f"n-gram, ε {row['epsilon']} (best R²)", row))
    hidden = {(row["layer"], row["position"], row["epsilon"]): row for row in kinds["hidden"]}
    for layer, epsilon in RECIPES:
        if row := hidden.get((layer, "prompt_end", epsilon)):
            out.append((f"hidden, {_where(row)}, ε {epsilon} (recipe)", row))
    for vectors in kinds["vectors"]:
        row = hidden.get((vectors.get("layer"), vectors["position"], vectors["auto_epsilon"]))
        if row and row["layer"] == main_layer(rows):
            out.append((f"hidden, {_where(row)}, ε {row['epsilon']} (auto)", row))
    scan = [row for row in hidden.values() if row["layer"] == main_layer(rows) and row["position"] == "prompt_end"]
    if scan:
        row = max(scan, key=lambda row: float(row["r2"]))
        out.append((f"hidden, {_where(row)}, ε {row['epsilon']} (best R²)", row))
    if hidden:
        best = max(hidden.values(), key=agreement)
        out.append((f"hidden, {_where(best)}, ε {best['epsilon']} (best by the truth)", best))
    return [*out, *((row["kind"], row) for row in rows if row["kind"] == "state")]


def agreement(row: Row) -> float:
    """Harmonic mean of purity and completeness."""
    purity, completeness = float(row["purity"]), float(row["completeness"])
    return 2 * purity * completeness / (purity + completeness)


def main_layer(rows: Iterable[Row]) -> str:
    """The paper's layer -8 where it was measured, else the last one that was."""
    found = {row["layer"] for row in rows if "layer" in row}
    return "-8" if "-8" in found else max(found, key=int)


def _vectors(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["kind"] == "vectors"]
    recipes = {layer for layer, _ in RECIPES}
    if any(row.get("layer") in recipes for row in found):  # a deep model: the others are in the file and the figures
        found = [row for row in found if row.get("layer", "-8") in recipes]
    lines = [
        [", ".join(setting_of(row)[3:]), row.get("layer", "–"), row["position"], *_cells(row, VECTORS)]
        for row in found
    ]
    return table(["player, responses", "layer", "position", *VECTORS.values()], lines)


def _where(row: Row) -> str:
    return f"layer {row['layer']} at {row['position']}"


def _cells(row: Row, columns: Iterable[str]) -> list[str]:
    return [_cell(name, row.get(name)) + _margin(row.get(f"{name}_ci")) for name in columns]


def _cell(name: str, value: str | None) -> str:
    if value is None:
        return "–"
    if name == "auto_refused":
        return "yes" if float(value) else "no"
    number = float(value)
    return f"{number:,.0f}" if number.is_integer() and abs(number) >= 2 else f"{number:.3g}"


def _margin(half_width: str | None) -> str:
    return "" if half_width is None else f" ± {float(half_width):.2g}"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines])
