"""What an iteration's partition and advantages look like, to hold a run against the paper (spec section 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from openrlhf_bipace.advantages.batch import Branch, StepBatch, StepPart
from openrlhf_bipace.advantages.segments import FLAT, add, owner, pair

# The paper's tables L.1 to L.3: task -> partition -> diagnostic (names as below, "bipace/" left out).
PAPER: dict[str, dict[str, dict[str, float]]] = {
    "ALFWorld-7B": {
        "observation": {
            "cluster_singleton_rate": 0.273,
            "cluster_size_mean": 7.5,
            "cluster_size_p90": 16.3,
            "matched_pairs": 37_000,
        },
        "hidden": {
            "cluster_singleton_rate": 0.180,
            "cluster_size_mean": 11.7,
            "cluster_size_p90": 26.7,
            "matched_pairs": 48_000,
            "rows_pace": 0.802,
            "rows_fallback": 0.179,
            "rows_singleton": 0.019,
            "clusters_multi_key": 0.583,
            "keys_per_cluster": 2.76,
            "parse_rate": 0.99,  # the paper says above this
        },
    },
    "TextCraft-7B": {
        "observation": {
            "cluster_singleton_rate": 0.503,
            "cluster_size_mean": 7.1,
            "cluster_size_p90": 16.1,
            "matched_pairs": 143_000,
        },
        "hidden": {
            "cluster_singleton_rate": 0.224,
            "cluster_size_mean": 21.6,
            "cluster_size_p90": 53.0,
            "matched_pairs": 314_000,
        },
    },
}

GIANT_SHARE = 0.5  # above: the largest cluster swallows its group
PARSE_RATE = 0.9  # below: many "actions" are failures to act


def diagnose(steps: StepBatch, step: StepPart | None, total: torch.Tensor, scope: str = "group") -> dict[str, float]:
    """Every diagnostic that can be computed, as finite floats under flat names. Shares are in [0, 1].

    An advantage within 1e-8 of 0 is a zero: rounding is no signal.

    Args:
        step: the step part, None for an estimator without one. total: [N] the final advantages.
        scope: what parts may cross, --bipace.scope; a cluster's share is of its group's, or the batch's, steps.
    """
    out = _about_rollouts(steps, total)
    if step is not None and len(steps):
        out |= (
            _about_sizes(steps, step, scope)
            | _about_rows(step)
            | _about_keys(steps, step)
            | _about_states(steps, step)
        )
    return {f"bipace/{name}": float(value) for name, value in out.items()}


def warnings(diagnostics: dict[str, float]) -> list[str]:
    """What in an iteration's diagnostics should worry its reader, one sentence each."""
    d = {name.removeprefix("bipace/"): value for name, value in diagnostics.items()}
    out = []
    if d.get("giant_share", 0) > GIANT_SHARE:
        out.append(
            f"one cluster holds {d['giant_share']:.0%} of its group's steps: Q-style advantages are biased in a giant "
            "cluster; lower --bipace.epsilon or read the hidden state elsewhere (--bipace.position)"
        )
    if d.get("parse_rate", 1) < PARSE_RATE:
        out.append(f"only {d['parse_rate']:.0%} of the responses gave a valid action")
    if d.get("step_share_zero", 0) == 1:
        out.append("every step advantage of the iteration is 0: no part has two different returns to compare")
    if d.get("groups_of_one", 0):
        out.append(f"{d['groups_of_one']:.0f} group(s) have one trajectory left; their episode advantages are 0")
    if d.get("groups", 0) and d.get("groups_without_signal") == d["groups"]:
        out.append("no group carries a signal: every advantage of the iteration is 0")
    return out


def _about_rollouts(steps: StepBatch, total: torch.Tensor) -> dict[str, Any]:
    loud = torch.zeros(steps.groups, dtype=torch.bool).index_fill_(0, steps.group[total.abs() > FLAT], True)
    out = {
        "steps": len(steps),
        "groups": steps.groups,
        "groups_of_one": (steps.group_size == 1).sum(),
        "groups_without_signal": (~loud).sum(),
        "trajectories": steps.trajectories,
        "trajectories_failed": steps.trajectories_failed,
        "trajectories_empty": steps.trajectories_empty,
    }
    if steps.valid is not None and len(steps):
        out["parse_rate"] = steps.valid.double().mean()
    return out


def _about_sizes(steps: StepBatch, step: StepPart, scope: str) -> dict[str, Any]:
    parts, size = step.parts, step.parts.size
    within, count = steps.within(scope)
    group = owner(within, parts.label, parts.count)
    share = size / add(size, group, count)[group]
    out = {
        "clusters": parts.count,
        "cluster_singleton_rate": (size == 1).double().mean(),
        "row_singleton_rate": (size == 1).double().sum() / len(steps),
        "cluster_size_mean": size.mean(),
        "cluster_size_p90": np.quantile(size.numpy(), 0.9),
        "giant_share": share[size == size.max()].max(),
        "matched_pairs": (size * (size - 1)).sum() / 2,  # unordered pairs of steps in one cluster
    }
    if bool((size > 1).any()):
        # Pooled over clusters: the square root of the mean within-cluster variance, unbiased.
        out["return_std_within"] = (((parts.x - parts.mean) ** 2).sum() / (size - 1).sum()).sqrt()
    return out


def _about_rows(step: StepPart) -> dict[str, Any]:
    names = {Branch.PACE: "rows_pace", Branch.FALLBACK: "rows_fallback", Branch.SINGLETON: "rows_singleton"}
    out = {name: (step.branch == branch).double().mean() for branch, name in names.items()}
    return out | {"step_share_zero": (step.value.abs() <= FLAT).double().mean()}


def _about_keys(steps: StepBatch, step: StepPart) -> dict[str, Any]:
    parts = step.parts
    key, count = pair(parts.label, steps.action_key)
    keys = torch.bincount(owner(parts.label, key, count), minlength=parts.count)
    out = {"keys_per_cluster": keys.double().mean()}
    if bool((parts.size > 1).any()):
        out["clusters_multi_key"] = (keys[parts.size > 1] > 1).double().mean()
    return out


def _about_states(steps: StepBatch, step: StepPart) -> dict[str, Any]:
    """Purity: the share of steps (with a known state) whose state is the most frequent one of their part."""
    if steps.state_key is None:
        return {}
    known = steps.state_key >= 0
    if not bool(known.any()):
        return {}
    label, state = step.parts.label[known], steps.state_key[known]
    both, count = pair(label, state)
    rows, part = torch.bincount(both, minlength=count), owner(label, both, count)
    most = torch.zeros(step.parts.count, dtype=torch.int64).scatter_reduce_(0, part, rows, "amax")
    return {"purity": most.sum().double() / known.sum()}
