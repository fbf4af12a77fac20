"""Advantage estimators: one value per step from a `StepBatch`. Pure tensor maths.

`estimate("bipace_q", steps, config)` pairs a partition (which steps are compared, `grouping.PARTITIONS`) with a
baseline (what a return is compared to, `BASELINES`). Every pairing exists as ``<partition>_<baseline>``; the papers'
names are `ALIASES`. To add a baseline: one file with a function ``(steps, parts, config) -> (value [N], branch [N])``
and one line in `BASELINES`. To add an estimator that is no such pairing, as `hgpo`: a function ``(steps, config) ->
StepPart`` and one line in `SPECIAL`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from openrlhf_bipace.advantages.batch import Branch, StepAdvantages, StepBatch, StepPart
from openrlhf_bipace.advantages.bipace import diff_baseline, q_baseline
from openrlhf_bipace.advantages.calibration import Calibration, calibrate, leave_one_out_r2
from openrlhf_bipace.advantages.diagnostics import diagnose
from openrlhf_bipace.advantages.gigpo import state_baseline
from openrlhf_bipace.advantages.grouping import PARTITIONS
from openrlhf_bipace.advantages.grpo import episode_advantage
from openrlhf_bipace.advantages.hgpo import hgpo
from openrlhf_bipace.advantages.hierarchy import constants, eb_baseline, nested_baseline
from openrlhf_bipace.advantages.returns import discounted_returns, from_trajectories
from openrlhf_bipace.advantages.segments import Parts
from openrlhf_bipace.advantages.tokens import loss_weights, to_tokens, write
from openrlhf_bipace.config import BipaceConfig

__all__ = [
    "ALIASES",
    "Branch",
    "Calibration",
    "StepAdvantages",
    "StepBatch",
    "calibrate",
    "check",
    "discounted_returns",
    "estimate",
    "from_trajectories",
    "is_ours",
    "leave_one_out_r2",
    "loss_weights",
    "names",
    "needs_hidden",
    "state_only",
    "to_tokens",
    "write",
]

BASELINES: dict[str, Callable[[StepBatch, Parts, BipaceConfig], tuple[torch.Tensor, torch.Tensor]]] = {
    "v": state_baseline,
    "q": q_baseline,
    "diff": diff_baseline,
    "eb": eb_baseline,
    "nested": nested_baseline,
}
ALIASES = {
    "gigpo": "observation_v",
    "pace_q": "observation_q",
    "pace_diff": "observation_diff",
    "bigpo": "hidden_v",
    "bipace_q": "hidden_q",
    "bipace_diff": "hidden_diff",
    "bipace_eb": "hidden_eb",
    "bipace_hgpo": "hidden_nested",
}
ANCHORED = ("eb", "nested")  # baselines that compare a part with its group too, and so need no good clusters
SPECIAL: dict[str, Callable[[StepBatch, BipaceConfig], StepPart] | None] = {
    "grpo": None,  # the episode part alone
    "hgpo": hgpo,
}


def names() -> list[str]:
    """Every name `estimate` accepts, the papers' names first."""
    return [*SPECIAL, *ALIASES, *(f"{p}_{b}" for p in PARTITIONS for b in BASELINES)]


def is_ours(name: str) -> bool:
    """Whether `estimate` knows `name` (OpenRLHF's own estimators are not ours)."""
    return name in names()


def needs_hidden(name: str) -> bool:
    """Whether the estimator reads `StepBatch.cluster`, that is hidden states. ValueError for an unknown name."""
    return _partition_of(name) == "hidden"


def state_only(name: str) -> str:
    """The estimator with the same partition and the state baseline: what a refused epsilon calibration falls back to.

    Example: "bipace_q" -> "bigpo". Estimators without an action comparison are returned as they are, and so are those
    of `ANCHORED`, which shrink by themselves what bad clusters say.
    """
    partition = _partition_of(name)
    plain = f"{partition}_v"
    if not partition or _baseline_of(name) in ANCHORED:
        return name
    return next((a for a, full in ALIASES.items() if full == plain), plain)


def check(name: str, config: BipaceConfig) -> None:
    """Refuse at start-up what `estimate` would refuse at the first iteration. ValueError naming the flags."""
    partition = _partition_of(name)
    if config.epsilon == "auto" and partition == "ngram":
        raise ValueError(
            f"--bipace.epsilon: got 'auto', allowed with {name}: a number (auto calibrates hidden states)"
        )
    if name == "hgpo" and not abs(config.hgpo_alpha) <= 100:  # NaN, or weights that overflow
        raise ValueError(f"--bipace.hgpo_alpha: got {config.hgpo_alpha}, allowed: an exponent in [-100, 100]")


def estimate(name: str, steps: StepBatch, config: BipaceConfig, *, diagnostics: bool = True) -> StepAdvantages:
    """A = A_episode + w * A_step of every step (spec section 2).

    Args:
        name: one of `names()`.
        steps: N rows, possibly none.
        config: every option of the estimator.
        diagnostics: also describe the partition (`diagnostics.diagnose`); without, that dict is empty.

    Raises:
        ValueError: an unknown name, or an input that the estimator needs and `steps` lacks.
    """
    check(name, config)
    episode = episode_advantage(steps, config)
    step = _step_part(name, steps, config)
    value = torch.zeros_like(episode) if step is None else step.value
    branch = torch.zeros(len(steps), dtype=torch.int8) if step is None else step.branch
    total = episode + config.w * value
    described = diagnose(steps, step, total, config.scope) if diagnostics else {}
    if _partition_of(name) == "one":
        described.pop("bipace/giant_share", None)  # 1 by design
    if diagnostics and step is not None and _baseline_of(name) == "eb":
        described |= constants(steps, step.parts, config)
    return StepAdvantages(episode, value, total, branch, described)


def _step_part(name: str, steps: StepBatch, config: BipaceConfig) -> StepPart | None:
    partition = _partition_of(name)
    if not partition:
        special = SPECIAL[name]
        return special(steps, config) if special else None
    parts = Parts.of(steps.ret, *PARTITIONS[partition](steps, config))
    baseline = _baseline_of(name)
    value, branch = BASELINES[baseline](steps, parts, config)
    if config.step_std:  # of an anchored baseline in units of its group: a part of one has a value there, but no std
        spread = Parts.of(steps.ret, *steps.within(config.scope)) if baseline in ANCHORED else parts
        value = spread.over_std(value)
    return StepPart(value, branch, parts)


def _partition_of(name: str) -> str:
    """Name of the estimator's partition, "" for those of `SPECIAL`."""
    if not is_ours(name):
        raise ValueError(f"advantage estimator: got {name!r}, allowed: {' | '.join(names())}")
    return "" if name in SPECIAL else ALIASES.get(name, name).rpartition("_")[0]


def _baseline_of(name: str) -> str:
    """Key in `BASELINES` of a pairing's name."""
    return ALIASES.get(name, name).rpartition("_")[2]
