"""What an evaluation found, as JSON and as tables; over several checkpoints also the peak and the last."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from openrlhf_bipace.evaluation.figures import OVERALL, Figures, by_type, over_seeds
from openrlhf_bipace.evaluation.log import Result


def as_json(evaluated: dict[str, Sequence[Result]]) -> dict[str, Any]:
    """Figures per policy (a checkpoint, or the name of a baseline), in the order given; of several, peak and last."""
    policies: dict[str, dict[str, Any]] = {}
    for name, results in evaluated.items():
        rows = by_type(results)
        seeds = over_seeds(results)
        policies[name] = {
            "overall": _plain(rows[OVERALL]),
            "by_type": {kind: _plain(row) for kind, row in rows.items() if kind != OVERALL},
            "success_per_seed": {str(seed): share for seed, share in seeds.items()},
            "success_std_over_seeds": statistics.stdev(seeds.values()) if len(seeds) > 1 else None,
        }
    out: dict[str, Any] = {"policies": policies}
    shares = {name: found["overall"]["success"] for name, found in policies.items() if found["overall"]}
    if len(shares) > 1:
        peak, last = max(shares, key=lambda name: shares[name]), list(shares)[-1]
        out["peak"] = {"policy": peak, "success": shares[peak]}
        out["last"] = {"policy": last, "success": shares[last]}
    return out


def tables(evaluated: dict[str, Sequence[Result]]) -> list[Table]:
    """A table per policy, success per kind of task; before them, for several policies, one that compares them."""
    out = []
    if len(evaluated) > 1:
        overall = {name: by_type(results)[OVERALL] for name, results in evaluated.items()}
        out.append(_table("success over checkpoints", "policy", overall))
        summary = as_json(evaluated)
        if "peak" in summary:
            out[0].caption = "; ".join(
                f"{what}: {_percent(summary[what]['success'])} ({escape(summary[what]['policy'])})"
                for what in ("peak", "last")
            )
    return out + [_table(name, "task type", by_type(results)) for name, results in evaluated.items()]


def _table(title: str, first: str, rows: dict[str, Figures | None]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold", min_width=15)
    graded = any(row is not None and row.score is not None for row in rows.values())
    for column in ("success", "95 %", "score" if graded else "reward", "turns", "invalid", "episodes"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        if row is None:
            table.add_row(escape(name), "every episode failed")
            continue
        table.add_row(
            escape(name),
            _percent(row.success),
            f"{100 * row.low:.1f}-{100 * row.high:.1f}",
            f"{row.reward:.2f}" if not graded else _percent(row.score or 0.0),
            f"{row.turns:.1f}",
            _percent(row.invalid),
            f"{row.episodes}+{row.failed} failed" if row.failed else str(row.episodes),
            style="bold" if name == OVERALL else None,
        )
    return table


def _plain(row: Figures | None) -> dict[str, Any] | None:
    return None if row is None else asdict(row)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
