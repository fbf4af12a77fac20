"""Finished runs as one table, and each run's scores: what the page and the figures are made of."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf_bipace.lab.compare.statistics import THRESHOLDS, Scores

FILE = "compare.csv"
KEYS = ("engine", "setting", "arm", "seed", "warm_start", "commit", "machine")
CURVE = ("iteration", "held_out", "train")
DIAGNOSTICS = (
    "bipace/purity",
    "bipace/giant_share",
    "bipace/row_singleton_rate",
    "bipace/rows_pace",
    "bipace/keys_per_cluster",
    "bipace/step_share_zero",
    "bipace/groups_without_signal",
    "bipace/r2",
    "bipace/parse_rate",
    "health/entropy",
    "health/grad_norm",
)


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: success in evaluation after so many iterations."""

    engine: str
    setting: str
    arm: str
    seed: int
    warm_start: int
    commit: str
    machine: str
    lines: tuple[dict[str, float], ...]

    @property
    def held_out(self) -> list[tuple[int, float]]:
        """(iteration, success)."""
        return [(int(line["iteration"]), line["held_out"]) for line in self.lines]

    def scores(self) -> dict[str, float]:
        """Area under the curve (its mean over the iterations), best, last, first iteration at each threshold.

        A threshold that was never reached counts as one evaluation after the last.
        """
        x, y = zip(*self.held_out, strict=True)
        area = sum((b - a) * (u + v) / 2 for a, b, u, v in zip(x, x[1:], y, y[1:], strict=False))
        out = {"area": area / (x[-1] - x[0]), "peak": max(y), "last": y[-1]}
        for threshold in THRESHOLDS:
            out[f"to_{threshold:.0%}"] = next((a for a, u in self.held_out if u >= threshold), 2 * x[-1] - x[-2])
        return out


def collect(work: Path) -> list[Curve]:
    """Every finished run under the folder `work`, in order of engine, setting, arm, seed."""
    out = []
    for file in work.glob("*/*/*/seed-*/curve.json"):
        found = json.loads(file.read_text())
        engine, setting, arm, seed = file.parts[-5:-1]
        keep = {*CURVE, *DIAGNOSTICS}
        lines = tuple({n: v for n, v in line.items() if n in keep} for line in found["lines"])
        number = int(seed.removeprefix("seed-"))
        source = found["warm_start"], found["commit"], found["machine"]
        out.append(Curve(engine, setting, arm, number, *source, lines))
    return sorted(out, key=lambda c: (c.engine, c.setting, c.arm, c.seed))


def write(curves: Sequence[Curve], path: Path) -> None:
    """One line per evaluation."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*KEYS, *CURVE, *DIAGNOSTICS])
        for c in curves:
            for line in c.lines:
                numbers = [f"{line[n]:.5g}" if n in line else "" for n in (*CURVE, *DIAGNOSTICS)]
                writer.writerow([*(getattr(c, key) for key in KEYS), *numbers])


def read(path: Path) -> list[Curve]:
    """What `write` wrote. ValueError naming a file that is not of this kind."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not set(KEYS + CURVE) <= rows[0].keys():
        raise ValueError(f"{path}: allowed: a file that `bipace-study compare` wrote, with runs in it")
    runs: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for row in rows:
        line = {n: float(row[n]) for n in (*CURVE, *DIAGNOSTICS) if row[n]}
        runs.setdefault(tuple(row[key] for key in KEYS), []).append(line)
    return [Curve(e, s, a, int(n), int(w), c, m, tuple(lines)) for (e, s, a, n, w, c, m), lines in runs.items()]


def scores_of(curves: Iterable[Curve], score: str) -> Scores:
    """Seed -> score."""
    return {c.seed: c.scores()[score] for c in curves}


def select(curves: Iterable[Curve], engine: str, setting: str, arm: str) -> list[Curve]:
    """One arm's runs."""
    return [c for c in curves if (c.engine, c.setting, c.arm) == (engine, setting, arm)]
