"""Figures of a set of rollouts, for the logs."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf_bipace.records import EndReason, Trajectory


def summarise(trajectories: Sequence[Trajectory], prefix: str = "agent") -> dict[str, float]:
    """Success, length and failure figures of `trajectories`, flat names under `prefix`.

    Failed trajectories are counted in ``<prefix>/failed`` and left out of every other figure.
    """
    sound = [t for t in trajectories if not t.end.failed]
    figures = {
        f"{prefix}/trajectories": float(len(trajectories)),
        f"{prefix}/failed": float(len(trajectories) - len(sound)),
    }
    if not sound:
        return figures
    steps = [s for t in sound for s in t.steps]
    count = len(sound)
    figures |= {
        f"{prefix}/success": sum(t.success for t in sound) / count,
        f"{prefix}/reward": sum(t.reward for t in sound) / count,
        f"{prefix}/turns": len(steps) / count,
        f"{prefix}/truncated": sum(t.end.truncated for t in sound) / count,
        **{f"{prefix}/end_{r.value}": sum(t.end is r for t in sound) / count for r in EndReason if not r.failed},
    }
    if steps:
        figures |= {
            f"{prefix}/valid_actions": sum(s.valid for s in steps) / len(steps),
            f"{prefix}/accepted_actions": sum(s.accepted for s in steps) / len(steps),
            f"{prefix}/response_tokens": sum(len(s.response_ids) for s in steps) / len(steps),
            f"{prefix}/cut_responses": sum(s.finish_reason == "length" for s in steps) / len(steps),
            f"{prefix}/cut_histories": sum(s.history_cut > 0 for s in steps) / len(steps),
        }
    return figures
