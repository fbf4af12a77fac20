"""The study's results: flat rows of one CSV file, to which every run adds its settings.

A setting is (environment, model, context, player, responses). Its rows differ in `kind`: one of "data", one of each
partition (`observation`, `state`, `one`) or of each partition and ε (`ngram`, `hidden`), and of "vectors" one per
layer and position and one of n-grams.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from openrlhf_bipace.advantages import from_trajectories
from openrlhf_bipace.advantages.batch import StepBatch
from openrlhf_bipace.advantages.calibration import cluster_steps
from openrlhf_bipace.advantages.grouping import PARTITIONS
from openrlhf_bipace.advantages.ngram import vectors
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.lab.geometry import measures
from openrlhf_bipace.lab.geometry.hidden import Phi
from openrlhf_bipace.records import Trajectory

SETTING = ("environment", "model", "context", "player", "responses")
KEY = ("kind", "layer", "position", "epsilon")
NGRAM = "ngram"  # instead of a position: the observation's word n-grams, for comparison
SIGNIFICANT = 4  # digits that the file keeps

Row = dict[str, Any]  # column -> value; from a file: str


def rows_of_setting(
    setting: Row, trajectories: Sequence[Trajectory], phi: Phi, epsilons: Sequence[float], config: BipaceConfig
) -> list[Row]:
    """Every row of one setting.

    Args:
        setting: its `SETTING` columns, and whatever else should stand in the "data" row.
        phi: [N, d] of the turns that count, by (layer, position).

    Raises ValueError where the environment does not tell its true state.
    """
    steps = from_trajectories(trajectories, config)
    if not len(steps) or bool((steps.state_key < 0).any()):
        raise ValueError(f"--env: got {setting['environment']}, allowed: one that gives the true state of every turn")
    same = {name: setting[name] for name in SETTING}
    out = [{**setting, "kind": "data", **measures.of_data(steps, trajectories)}]
    for name in ("one", "observation", "state"):
        labels, _ = PARTITIONS[name](steps, config)
        out.append({**same, "kind": name, **measures.of_partition(labels, steps, config)})
    words = vectors(steps.observation_text, config.ngram)
    out.append({**same, "kind": "vectors", "position": NGRAM, **measures.of_vectors(words, steps, config)})
    out += _scan({**same, "kind": "ngram"}, words, steps, epsilons, config)
    for (layer, position), vector in phi.items():
        place = {**same, "layer": layer, "position": position}
        out.append({**place, "kind": "vectors", **measures.of_vectors(vector, steps, config)})
        out += _scan({**place, "kind": "hidden"}, vector, steps, epsilons, config)
    return out


def _scan(head: Row, phi: Any, steps: StepBatch, epsilons: Sequence[float], config: BipaceConfig) -> Iterator[Row]:
    for epsilon in epsilons:
        labels = cluster_steps(phi, steps, config, epsilon).labels
        yield {**head, "epsilon": epsilon, **measures.of_partition(labels, steps, config)}


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """`new`, and of `old` the settings that `new` does not have; in order of the settings' names."""
    fresh = {setting_of(row) for row in new}
    kept = [row for row in old if setting_of(row) not in fresh]
    return sorted([*kept, *new], key=setting_of)


def setting_of(row: Row) -> tuple[str, ...]:
    """The row's `SETTING` columns."""
    return tuple(str(row[name]) for name in SETTING)


def read(path: Path) -> list[Row]:
    """The rows of a file, as strings; none if there is no file. ValueError for a file of something else."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{name: value for name, value in row.items() if value != ""} for row in csv.DictReader(file)]
    for number, row in enumerate(rows, 2):
        if not {*SETTING, "kind"} <= row.keys():
            raise ValueError(f"{path}, line {number}: got no {', '.join(SETTING)} and kind; not a file of this study")
    return rows


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write `rows`, numbers to `SIGNIFICANT` digits, their columns in order of first appearance."""
    columns = list(dict.fromkeys([*SETTING, *KEY, *(name for row in rows for name in row)]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _short(value) for name, value in row.items()} for row in rows)


def _short(value: Any) -> Any:
    return f"{value:.{SIGNIFICANT}g}" if isinstance(value, float) else value
