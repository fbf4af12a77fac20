"""Signs that training is going wrong: metrics for every iteration, and a sentence for what should worry its reader."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf_bipace.records import StepRecord, Trajectory

REPEATED = 0.5  # a response is repetitive if one token fills more than this share of it ...
SHORTEST = 8  # ... and it has at least this many tokens
# metric -> (limit, alarm above it (+1) or below it (-1), what it means)
ALARMS = {
    "health/repetitive": (0.2, 1, "responses are one token over and over: the policy is collapsing"),
    "health/entropy": (0.01, -1, "nats per token is all the entropy left: the policy no longer explores"),
    "health/refused_actions": (0.5, 1, "actions were not understood or not allowed"),
    "health/truncated": (0.5, 1, "trajectories ended at the turn cap or the length budget, not by themselves"),
    "health/cut_responses": (0.2, 1, "responses were cut at --agent.max_turn_tokens"),
    "health/groups_without_signal": (0.8, 1, "groups carry no signal: all their rollouts ended alike"),
}


def examine(trajectories: Sequence[Trajectory], metrics: dict[str, float]) -> dict[str, float]:
    """Health figures of one iteration, shares in [0, 1]; rollouts that do not count are left out.

    Args:
        metrics: the iteration's other figures, of which `bipace/groups` and `bipace/groups_without_signal` are read.
    """
    sound = [t for t in trajectories if t.counts]
    steps = [step for t in sound for step in t.steps]
    if not steps:
        return {}
    out = {
        "health/repetitive": _share(steps, _repetitive),
        "health/refused_actions": _share(steps, lambda step: not (step.valid and step.accepted)),
        "health/truncated": sum(t.end.truncated for t in sound) / len(sound),
        "health/cut_responses": _share(steps, lambda step: step.finish_reason == "length"),
    }
    if metrics.get("bipace/groups"):
        out["health/groups_without_signal"] = metrics["bipace/groups_without_signal"] / metrics["bipace/groups"]
    return out


def alarms(figures: dict[str, float]) -> list[str]:
    """One sentence for each figure beyond its limit in `ALARMS`."""
    out = []
    for name, (limit, side, meaning) in ALARMS.items():
        value = figures.get(name)
        if value is not None and side * (value - limit) > 0:
            shown = f"{value:.3f}" if side < 0 else f"{value:.0%}"
            out.append(f"{shown} {'of the ' if side > 0 else ''}{meaning} ({name})")
    return out


def staleness(trajectories: Sequence[Trajectory], weights: int) -> dict[str, float]:
    """How many weight updates the turns are behind the policy that trains on them.

    Args:
        weights: how often the engines have received new weights by now.
    """
    ages = [weights - step.weights for t in trajectories for step in t.steps]
    if not ages:
        return {}
    return {"agent/staleness_mean": sum(ages) / len(ages), "agent/staleness_max": float(max(ages))}


def _share(steps: Sequence[StepRecord], holds) -> float:
    return sum(map(holds, steps)) / len(steps)


def _repetitive(step: StepRecord) -> bool:
    ids = step.response_ids
    return len(ids) >= SHORTEST and max(map(ids.count, set(ids))) > REPEATED * len(ids)
