"""The figures of a report: success with its interval, time per phase, the outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openrlhf_bipace.report.load import Line, Run

Z = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
WINDOW = 5  # iterations averaged at either end of a run
OWN = "bipace/seconds_"
DASH = "–"

# metrics.jsonl name -> words; the own ones happen inside make_experience.
PHASES = {
    "timing/generation": "generation (rollouts)",
    "timing/make_experience": "make_experience (forwards, advantages)",
    "phase/old_logprobs": "of which old log-probabilities",
    "bipace/seconds_hidden": "of which hidden-state capture",
    "bipace/seconds_clustering": "of which clustering",
    "bipace/seconds_advantages": "of which advantages",
    "timing/ppo_train": "ppo_train (updates)",
    "timing/broadcast": "broadcast (weights to vLLM)",
    "timing/step_total": "whole iteration",
}


@dataclass(slots=True)
class Success:
    """Share of successful episodes at one evaluation."""

    step: int
    share: float
    episodes: int  # failed ones left out
    failed: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the share."""
        return wilson(self.share * self.episodes, self.episodes)

    def __str__(self) -> str:
        low, high = self.interval
        count = f"{round(self.share * self.episodes)} of {self.episodes}; 95 %: {100 * low:.1f} to {100 * high:.1f} %"
        failed = f"; {self.failed} failed left out" if self.failed else ""
        return f"{percent(self.share)} ({count}{failed}) at step {self.step}"


@dataclass(slots=True)
class Phase:
    """Mean time of one phase."""

    name: str  # as in metrics.jsonl
    seconds: float  # mean per iteration
    share: float  # of the whole iteration

    @property
    def own(self) -> bool:
        """Time that BiPACE adds."""
        return self.name.startswith(OWN)


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion. Nothing is known at n = 0: (0, 1)."""
    if n <= 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z * Z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean(lines: Sequence[Line], name: str) -> float | None:
    """Mean of `name` over the lines that have it, None if none does."""
    values = [line[name] for line in lines if name in line]
    return sum(values) / len(values) if values else None


def held_out(run: Run) -> list[Success]:
    """Every evaluation's success, in time order."""
    out = []
    for line in run.evaluations:
        if "eval/success" in line:
            failed = int(line.get("eval/failed", 0))
            episodes = int(line.get("eval/trajectories", 0)) - failed
            out.append(Success(int(line["step"]), line["eval/success"], episodes, failed))
    return out


def timed(run: Run) -> list[Line]:
    """Iterations whose time counts: all but the first, which warms up, unless it is the only one."""
    return run.training[1:] or run.training


def phases(run: Run) -> list[Phase]:
    """Time per phase that was measured, in the order of an iteration, the whole of it last."""
    lines = timed(run)
    total = mean(lines, "timing/step_total")
    found = [(name, mean(lines, name)) for name in PHASES]
    return [Phase(name, seconds, seconds / total) for name, seconds in found if seconds is not None and total]


def window(run: Run) -> int:
    """Iterations averaged at either end: `WINDOW`, fewer where the two ends would overlap."""
    return max(1, min(WINDOW, len(run.training) // 2))


def outcome(run: Run) -> dict[str, str]:
    """What came out of the run, in words: figure -> value."""
    tests = held_out(run)
    out = {"estimator": run.estimator, "environment": str(run.flag("agent.env", "") or DASH)}
    if len(tests) == 1:
        out["held-out success"] = str(tests[0])
    elif tests:
        out["held-out success, first"] = str(tests[0])
        out["held-out success, last"] = str(tests[-1])
    for title, name, form in (
        ("training success", "agent/success", percent),
        ("turns per training episode", "agent/turns", "{:.1f}".format),
        ("valid training actions", "agent/valid_actions", percent),
    ):
        text = _first_and_last(run, name, form)
        if text:
            out[title] = text
    failed = sum(line.get("agent/failed", 0) for line in run.training)
    if failed:
        out["failed training episodes"] = f"{failed:.0f} (left out of every figure)"
    seconds = sum(line.get("timing/step_total", 0.0) for line in run.training)
    k = window(run)
    ends = f" (arrows: first {k} to last {k})" if len(run.training) > 1 else ""
    out["iterations"] = f"{len(run.training)}{ends}"
    out["training time"] = duration(seconds)
    return out


def side_by_side(outcomes: Sequence[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Rows (figure, one value per run) in the order of the longest outcome."""
    longest: dict[str, str] = max(outcomes, key=lambda o: len(o))
    names = dict.fromkeys([*longest, *(name for o in outcomes for name in o)])
    return [(name, [o.get(name, DASH) for o in outcomes]) for name in names]


def percent(share: float) -> str:
    """0.125 -> "12.5 %"."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Seconds in the unit a reader would use."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _first_and_last(run: Run, name: str, form: Callable[[float], str]) -> str:
    k = window(run)
    first, last = mean(run.training[:k], name), mean(run.training[-k:], name)
    if first is None or last is None:
        return ""
    return form(last) if len(run.training) == 1 else f"{form(first)} → {form(last)}"
