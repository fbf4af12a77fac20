"""How well a partition, or the vectors behind it, tell the environment's true states apart.

``<measure>_ci`` is half a 95 % interval, by the jackknife over prompt groups: how much the tasks matter that happened
to be played.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.stats import mannwhitneyu

from openrlhf_bipace.advantages import calibrate, estimate, leave_one_out_r2
from openrlhf_bipace.advantages.batch import StepBatch
from openrlhf_bipace.advantages.segments import owner, pair
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.lab.oracle.measures import Measure

# of `advantages.diagnostics`, what describes a partition rather than its advantages
DIAGNOSTICS = (
    "clusters",
    "row_singleton_rate",
    "cluster_size_mean",
    "cluster_size_p90",
    "giant_share",
    "matched_pairs",
    "rows_pace",
    "rows_fallback",
    "rows_singleton",
    "keys_per_cluster",
    "clusters_multi_key",
    "return_std_within",
)
DIGITS = 9  # to which cosines are compared: equal vectors differ in the last bits
QUANTILES = (10, 50, 90)
PAIRS = 2**14  # whose vectors are multiplied at a time


def of_data(steps: StepBatch, trajectories: Sequence[Any]) -> dict[str, float]:
    """What was collected. `states` are counted within groups, as clusters are."""
    states, count = pair(steps.group, steps.state_key)
    texts = pair(states, steps.observation_key)[1]
    return {
        "trajectories": len(trajectories),
        "success": float(np.mean([t.success for t in trajectories])),
        "turns": len(steps),
        "turns_per_group": len(steps) / steps.groups,
        "parse_rate": float(steps.valid.double().mean()),
        "accepted_rate": float(np.mean([step.accepted for t in trajectories for step in t.steps])),
        "states": count,
        "texts_per_state": texts / count,
        "states_per_text": texts / pair(steps.group, steps.observation_key)[1],
    }


def of_partition(labels: torch.Tensor, steps: StepBatch, config: BipaceConfig) -> dict[str, float]:
    """Sizes, action keys and returns as an iteration's diagnostics have them, purity, completeness and R².

    Purity: share of turns whose state is their part's most frequent one. Completeness: share of turns that are in the
    largest part of their state. Needs the true state of every turn.

    Args:
        labels: [N] int64; parts never cross groups.
    """
    steps.cluster = labels
    described = estimate("bipace_q", steps, config).diagnostics
    state, _ = pair(steps.group, steps.state_key)
    shares = {
        "cluster_singleton_rate": lambda keep: _singletons(labels[keep]),
        "purity": lambda keep: majority_share(labels[keep], state[keep]),
        "completeness": lambda keep: majority_share(state[keep], labels[keep]),
    }
    out = {name: described[f"bipace/{name}"] for name in DIAGNOSTICS if f"bipace/{name}" in described}
    for name, share in shares.items():
        out |= _with_interval(name, share, steps.group)
    return out | {"r2": leave_one_out_r2(labels, steps, config.scope)}


def majority_share(part: torch.Tensor, key: torch.Tensor) -> float:
    """Share of rows whose `key` [N] is the most frequent one of their `part` [N]."""
    both, count = pair(part, key)
    rows = torch.bincount(both, minlength=count)
    parts = owner(part, both, count)
    most = torch.zeros(int(part.max()) + 1, dtype=torch.int64).scatter_reduce_(0, parts, rows, "amax")
    return float(most.sum()) / len(part)


def _singletons(labels: torch.Tensor) -> float:
    sizes = torch.unique(labels, return_counts=True)[1]
    return float((sizes == 1).double().mean())


def of_vectors(phi: torch.Tensor, steps: StepBatch, config: BipaceConfig) -> dict[str, float]:
    """Measures of the vectors themselves, and the ε of --bipace.epsilon auto. Those of no pairs at all are left out.

    anisotropy: mean cosine of any two turns. All else is of pairs of turns of one group. auc: probability that a pair
    of one state has a larger cosine than a pair of two states (ties count half). auc_new_text: the same for pairs of
    different texts, which an observation hash never joins. auc_turn, auc_trajectory: of pairs of one turn number or
    one trajectory against the others. distance_*: percentiles of 1 - cosine.

    Args:
        phi: [N, d] float.
    """
    unit = torch.nn.functional.normalize(phi.double(), dim=1)
    n = len(unit)
    total = unit.sum(dim=0)
    out = {"anisotropy": float((total @ total - n) / (n * (n - 1)))} if n > 1 else {}
    i, j = _pairs(steps)
    cosine = torch.cat([(unit[a] * unit[b]).sum(dim=1) for a, b in zip(i.split(PAIRS), j.split(PAIRS), strict=True)])
    cosine, group = cosine.round(decimals=DIGITS), steps.group[i]
    same, new_text = steps.state_key[i] == steps.state_key[j], steps.observation_key[i] != steps.observation_key[j]
    for name, chosen in (("same", same), ("same_new_text", same & new_text), ("different", ~same)):
        out[f"pairs_{name}"] = int(chosen.sum())
        if chosen.any():
            found = np.percentile(1 - cosine[chosen], QUANTILES)
            out |= {f"distance_{name}_p{q}": float(value) for q, value in zip(QUANTILES, found, strict=True)}
    wanted = {
        "auc": (same, torch.ones_like(same)),
        "auc_new_text": (same, new_text),
        "auc_turn": (steps.turn[i] == steps.turn[j], torch.ones_like(same)),
        "auc_trajectory": (steps.row[i] == steps.row[j], torch.ones_like(same)),
    }
    for name, (label, kept) in wanted.items():
        out |= _with_interval(name, partial(_auc_where, cosine, label, kept), group)
    found = calibrate(phi, steps, config)
    return out | {
        "auto_epsilon": found.epsilon,
        "auto_r2": found.r2,
        "auto_refused": float(found.refused),
    }


def _pairs(steps: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The two rows of every pair of turns of one group."""
    found = []
    for group in range(steps.groups):
        rows = torch.nonzero(steps.group == group)[:, 0]
        found.append(rows[torch.triu_indices(len(rows), len(rows), offset=1)])
    return tuple(torch.cat(found, dim=1))


def _auc_where(score: torch.Tensor, label: torch.Tensor, kept: torch.Tensor, keep: torch.Tensor) -> float:
    return _auc(score[kept & keep], label[kept & keep])


def _auc(score: torch.Tensor, label: torch.Tensor) -> float:
    """Probability that a score of label True beats one of label False; NaN where one kind is missing."""
    higher, lower = score[label], score[~label]
    if not len(higher) or not len(lower):
        return math.nan
    return float(mannwhitneyu(higher, lower).statistic / (len(higher) * len(lower)))


def _with_interval(name: str, measure: Callable[[torch.Tensor], float], group: torch.Tensor) -> dict[str, float]:
    """`measure` of all rows, and the half-width of its interval; without either where it is not defined.

    Args:
        measure: of the rows that a bool mask [N] keeps.
        group: [N] int64 codes 0 .. groups - 1 of the rows.
    """
    value = measure(torch.ones_like(group, dtype=torch.bool))
    if math.isnan(value):
        return {}
    groups = torch.unique(group)
    without = np.array([measure(group != one) for one in groups]) if len(groups) > 1 else np.array([math.nan])
    if np.isnan(without).any():
        return {name: value}
    return {name: value, f"{name}_ci": Measure(value, without).half_width}
