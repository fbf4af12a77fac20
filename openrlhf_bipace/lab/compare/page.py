"""compare.md: the tables of the study, from the collected runs alone."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf_bipace.lab.compare.arms import ARMS
from openrlhf_bipace.lab.compare.collect import DIAGNOSTICS, Curve, scores_of, select
from openrlhf_bipace.lab.compare.plan import QUESTIONS
from openrlhf_bipace.lab.compare.runs import WARM_STARTS
from openrlhf_bipace.lab.compare.statistics import (
    THRESHOLDS,
    Interval,
    holm,
    interquartile_mean,
    mean,
    paired_difference,
    probability_of_improvement,
    sign_flip_p,
)

SCORES = {"area": "area under the curve", "peak": "best", "last": "last"}
SHOWN = {name: name.partition("/")[2].replace("_", " ") for name in DIAGNOSTICS}


def stratum(seed: int) -> int:
    """The warm start of a seed."""
    return seed % WARM_STARTS


def markdown(curves: Sequence[Curve]) -> str:
    """The whole page."""
    pairs = list(dict.fromkeys((c.engine, c.setting) for c in curves))
    parts = [
        "# Comparison tables",
        "What was asked, how it was run and what to make of it: [docs/compare.md](../compare.md). Written by "
        "`bipace-study compare --draw` from [compare.csv](compare.csv). Scores are success sampled at "
        "temperature 1 on held-out tasks (`textcraft`: new draws on the tasks trained on); brackets "
        "hold 95 % intervals over seeds, stratified by warm start. A dash: too few seeds.",
        _sources(curves),
    ]
    for engine, setting in pairs:
        own = [c for c in curves if (c.engine, c.setting) == (engine, setting)]
        parts += [f"## {setting}, engine {engine}", _questions(own, engine, setting), _arms(own), _diagnostics(own)]
    parts += [_engines(curves, setting) for setting in dict.fromkeys(setting for _, setting in pairs)]
    parts += ["![learning curves](compare_curves.png)", "![differences](compare_differences.png)"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _sources(curves: Sequence[Curve]) -> str:
    commits = ", ".join(sorted({c.commit for c in curves}))
    machines = "; ".join(sorted({c.machine for c in curves}))
    return f"{len(curves)} runs, at commit {commits}, on {machines}."


def answers(curves: Sequence[Curve], engine: str, setting: str) -> list[tuple]:
    """(question, seeds, difference, probability of improvement, Holm's p) where both arms have common seeds."""
    found = []
    for q in (q for q in QUESTIONS if q.setting == setting):
        a, b = (scores_of(select(curves, engine, setting, arm), "area") for arm in (q.a, q.b))
        both = a.keys() & b.keys()
        if len(both) > 1:
            a, b = ({seed: x[seed] for seed in both} for x in (a, b))
            gap, better = paired_difference(a, b, stratum), probability_of_improvement(a, b, stratum)
            found.append((q, len(both), gap, better, sign_flip_p(a, b)))
    adjusted = holm([p for *_, p in found])
    return [(*rest, p) for (*rest, _), p in zip(found, adjusted, strict=True)]


def _questions(curves: Sequence[Curve], engine: str, setting: str) -> str:
    rows = [
        f"| {q.text} | `{q.a}` - `{q.b}` | {n} | {_text(gap, '+')} | {_text(better)} | {p:.3f} | {_verdict(gap, p)} |"
        for q, n, gap, better, p in answers(curves, engine, setting)
    ]
    if not rows:
        return ""
    head = "| question | difference | seeds | in area under the curve | P(improvement) | p, Holm | |"
    return "\n".join([head, "|---" * 7 + "|", *rows])


def _verdict(gap: Interval, p: float) -> str:
    if p < 0.05:
        return "**yes**" if gap.value > 0 else "**no: worse**"
    return "not shown"


def _arms(curves: Sequence[Curve]) -> str:
    thresholds = [f"to_{t:.0%}" for t in THRESHOLDS]
    head = ["arm", "seeds", *SCORES.values(), "area, interquartile mean"]
    head += [f"iterations to {t:.0%}, mean (reached)" for t in THRESHOLDS] + ["area minus `grpo`, paired"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    base = {c.seed: c.scores()["area"] for c in curves if c.arm == "grpo"}
    for arm in sorted({c.arm for c in curves}, key=[*ARMS].index):
        own = [c for c in curves if c.arm == arm]
        cells = [f"`{arm}`", str(len(own))]
        cells += [_text(mean(scores_of(own, score), stratum)) for score in SCORES]
        area = scores_of(own, "area")
        cells.append(_text(interquartile_mean(area, stratum)))
        last = own[0].held_out[-1][0]
        for name in thresholds:
            found = scores_of(own, name).values()
            cells.append(f"{sum(found) / len(found):.1f} ({sum(x <= last for x in found)}/{len(own)})")
        both = arm != "grpo" and area.keys() & base.keys()
        cells.append(_text(paired_difference(area, base, stratum), "+") if both else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _diagnostics(curves: Sequence[Curve]) -> str:
    """Means over the training iterations of all seeds."""
    names = [n for n in SHOWN if any(n in line for c in curves for line in c.lines)]
    lines = [f"| arm | {' | '.join(SHOWN[n] for n in names)} |", "|---" * (len(names) + 1) + "|"]
    for arm in sorted({c.arm for c in curves}, key=[*ARMS].index):
        own = [line for c in curves if c.arm == arm for line in c.lines]
        cells = []
        for name in names:
            found = [line[name] for line in own if name in line]
            cells.append(f"{sum(found) / len(found):.3f}" if found else "")
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "Diagnostics, means over the training iterations:\n\n" + "\n".join(lines)


def _engines(curves: Sequence[Curve], setting: str) -> str:
    """Both engines on the seeds that both have run; "" where there are none."""
    head = ["arm", "seeds", "area, lab", "area, full", "full minus lab, paired"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm in ARMS:
        lab, full = (scores_of(select(curves, engine, setting, arm), "area") for engine in ("lab", "full"))
        both = sorted(lab.keys() & full.keys())
        if both:
            areas = [sum(scores[seed] for seed in both) / len(both) for scores in (lab, full)]
            gap = _text(paired_difference(full, lab, stratum), "+")
            lines.append(f"| `{arm}` | {len(both)} | {areas[0]:.3f} | {areas[1]:.3f} | {gap} |")
    return "\n".join([f"## {setting}: the lab against the full stack\n", *lines]) if len(lines) > 2 else ""


def _text(interval: Interval, sign: str = "") -> str:
    value, low, high = (format(x, f"{sign}.3f") for x in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]" if interval.low == interval.low else f"{value} [-]"
