"""One setting of the study: a world, a group size, a list of arms; from resamples to a row of measures per arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.lab.oracle import measures
from openrlhf_bipace.lab.oracle.arms import Arm, Panel, exact
from openrlhf_bipace.lab.oracle.gradient import Compass
from openrlhf_bipace.lab.oracle.measures import Measure
from openrlhf_bipace.lab.oracle.sample import Rows, Sampler
from openrlhf_bipace.lab.oracle.world import World

DESCRIBED = ("purity", "giant_share", "row_singleton_rate", "rows_fallback", "r2")  # diagnostics to report beside


@dataclass
class Setting:
    """What one process computes on its own."""

    name: dict[str, Any]  # columns that tell it from other settings
    make: Callable[[], World]
    groups: int  # G
    resamples: int
    base: BipaceConfig  # of every arm, but for the arm's own options
    arms: list[Arm]
    seed: int


@dataclass(slots=True)
class Result:
    """One arm's measures in one setting."""

    name: dict[str, Any]
    arm: Arm
    seed: int
    epsilon: float | None  # in force, for arms that cluster hidden states
    measures: dict[str, Measure]
    described: dict[str, float]  # mean diagnostics; with epsilon "auto" also the share of refusals


def run(setting: Setting) -> list[Result]:
    """Every arm on the same resamples."""
    world = setting.make()
    sampler, panel = Sampler(world, setting.groups, setting.seed), Panel(world, setting.arms, setting.base)
    rows, truths, found = [], [], []
    for number in range(setting.resamples):
        sample = sampler.draw(number)
        rows.append(sample.rows)
        truths.append(exact(world, sample))
        found.append(panel.run(sample))
    batch = np.repeat(np.arange(setting.resamples), [len(r.task) for r in rows])
    every = Rows(*(np.concatenate([getattr(r, f.name) for r in rows]) for f in fields(Rows)))
    truth = [np.concatenate(column) for column in zip(*truths, strict=True)]
    compasses = {kind: Compass(world, reasoning, every, batch) for kind, reasoning in world.reasoning.items()}
    cells, out = _cells(every), []
    for one in setting.arms:
        step, total = (np.concatenate([values[one][part] for values in found]) for part in (0, 1))
        parts = {"total": total} if one.estimator == "grpo" else {"step": step, "total": total}
        measured = score(parts, truth, cells, batch, compasses, units=not one.config(setting.base).step_std)
        described = {name: panel.described_as(one, name) for name in DESCRIBED}
        if one in panel.calibrated:
            described["refused"] = float(np.mean([e is None for e in panel.calibrated[one]]))
        described = {name: value for name, value in described.items() if value is not None}
        out.append(Result(setting.name, one, setting.seed, panel.epsilon_of(one), measured, described))
    return out


def score(
    parts: dict[str, np.ndarray],
    truth: list[np.ndarray],
    cells: tuple[np.ndarray, np.ndarray],
    batch: np.ndarray,
    compasses: dict[str, Compass],
    units: bool,
) -> dict[str, Measure]:
    """Measures of one arm by name.

    The step part is held against the discounted advantage, the total against the undiscounted one; both gradients
    against the gradient of the expected (undiscounted) return.

    Args:
        parts: "total" and, if the arm has one, "step": [N] values of every turn of every resample.
        truth: as `arms.exact`.
        cells: as `measures.accuracy`.
        batch: [N] int, the resample of each turn.
        compasses: by response kind.
        units: the step part is in units of the return; without (`step_std`) it has no error.
    """
    batches = int(batch.max()) + 1
    against = {"step": truth[0], "total": truth[2]}
    out = {}
    if units and "step" in parts:
        out |= measures.accuracy(parts["step"], truth[0], cells, batch, batches)
    for part, values in parts.items():
        agreement = measures.agreement(values, against[part], batch, batches)
        out |= {f"{part}_{k}": v for k, v in agreement.items()}
        for kind, compass in compasses.items():
            found = measures.cosines(compass.directions(values))
            out |= {f"{part}_{k}_{kind}": v for k, v in found.items()}
    return out


def _cells(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """([N], [N]) numbers of (task, turn, state, action) and of (task, turn, state)."""
    columns = [rows.task, rows.turn, rows.state]
    return tuple(np.unique(np.stack(c), axis=1, return_inverse=True)[1] for c in ([*columns, rows.action], columns))
