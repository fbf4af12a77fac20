"""What is compared: estimators with their options, run by the trainer's own code on one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages import StepBatch, calibrate, leave_one_out_r2
from openrlhf_bipace.advantages.ngram import vectors
from openrlhf_bipace.advantages.pipeline import CreditPipeline
from openrlhf_bipace.clustering import cluster
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.lab.oracle.sample import Sample
from openrlhf_bipace.lab.oracle.world import World


@dataclass(frozen=True, slots=True)
class Arm:
    """One estimator with the options that differ from the setting's configuration."""

    estimator: str  # of `advantages.names()`, or one of `REFERENCES`
    options: tuple[tuple[str, Any], ...] = ()  # (BipaceConfig field, value)

    @property
    def label(self) -> str:
        """For example ``bipace_q shrink=1``."""
        return " ".join([self.estimator, *(f"{name}={value}" for name, value in self.options)])

    def config(self, base: BipaceConfig) -> BipaceConfig:
        """`base` with this arm's options."""
        return replace(base, **dict(self.options))


def arm(estimator: str, **options: Any) -> Arm:
    """``arm("bipace_q", shrink=1)``."""
    return Arm(estimator, tuple(options.items()))


DESCRIBED = 25  # samples whose diagnostics are averaged; they vary little

# Not estimators: what the exact values would give on the same rows.
TRUE_A, TRUE_V = "true A", "R - true V"
REFERENCES = (TRUE_A, TRUE_V)

MAIN = [
    *(arm(name) for name in REFERENCES),
    arm("grpo"),
    *(arm(name) for name in ("gigpo", "hgpo", "pace_q", "pace_diff")),
    *(arm(name) for name in ("bigpo", "bipace_q", "bipace_diff")),
    arm("bipace_q", shrink=1.0),
    *(arm(f"{partition}_{baseline}") for partition in ("one", "ngram", "state") for baseline in ("v", "q", "diff")),
    arm("state_q", shrink=1.0),
    arm("bipace_q", fallback="q", shrink=2.0),
    *(arm(name) for name in ("bipace_eb", "bipace_hgpo", "one_nested", "state_nested")),
]
# option -> values to hold against the default, and the estimators it is tried with
CHOICES: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "centroid": (("seed",), ("bigpo", "bipace_q")),
    "order": (("trajectory",), ("bigpo", "bipace_q")),
    "fallback": (("q", "zero"), ("bipace_q",)),
    "single_key": (("rloo",), ("bipace_q",)),
    "peers": (("exclusive",), ("bipace_q",)),
    "shrink": ((0.5, 1.0, 2.0, 4.0), ("bipace_q",)),
    "step_std": ((True,), ("gigpo", "bigpo", "bipace_q")),
    "action_key": (("first_tokens",), ("bipace_q",)),
    "w": ((0.25, 4.0, 16.0), ("bigpo", "bipace_q")),
    "episode_mode": (("mean",), ("grpo", "bipace_q")),
    "episode_weighting": (("trajectory",), ("grpo", "bipace_q")),
    "epsilon": (("auto",), ("bipace_q",)),
}


SCANNED = (arm("bigpo"), arm("bipace_q"), arm("bipace_diff"), arm("bipace_hgpo"))  # over epsilon
AUTO = arm("bipace_q", epsilon="auto")


def scan(grid: Sequence[float]) -> list[Arm]:
    """`SCANNED` at every epsilon of `grid`."""
    return [arm(one.estimator, **dict(one.options), epsilon=epsilon) for epsilon in grid for one in SCANNED]


def choice_arms() -> list[Arm]:
    """Every arm of `CHOICES`."""
    return [
        arm(estimator, **{option: value})
        for option, (values, estimators) in CHOICES.items()
        for value in values
        for estimator in estimators
    ]


@dataclass
class Panel:
    """Runs `arms` on sample after sample, in order.

    The estimators' inputs are made once per distinct option: records to `StepBatch`, vectors to clusters. With epsilon
    "auto" every sample is the first iteration of a run: a fresh `CreditPipeline`, so that the measures average over
    what the calibration may choose. The n-gram partition has an epsilon of its own, calibrated on the first sample.
    """

    world: World
    arms: list[Arm]
    base: BipaceConfig
    described: dict[Arm, list[dict[str, float]]] = field(default_factory=dict)  # diagnostics of the first samples
    calibrated: dict[Arm, list[float | None]] = field(default_factory=dict)  # epsilon per sample, None: refused
    _ngram_epsilon: float | None = None

    def __post_init__(self) -> None:
        if self.base.gamma != self.world.gamma:
            raise ValueError(f"gamma: got {self.base.gamma}, allowed: the world's {self.world.gamma}")

    def run(self, sample: Sample) -> dict[Arm, tuple[np.ndarray, np.ndarray]]:
        """Per arm the step part [N] and the total [N] of every turn."""
        batches: dict[str, StepBatch] = {}
        labels: dict[Any, tuple[torch.Tensor, float]] = {}
        out = {}
        for one in self.arms:
            if one.estimator in REFERENCES:
                out[one] = self._reference(one.estimator, sample)
                continue
            config = one.config(self.base)
            if config.epsilon == "auto":
                out[one] = self._pipeline(one, config, sample)
                continue
            if config.action_key not in batches:
                batches[config.action_key] = advantages.from_trajectories(sample.trajectories, config)
            steps = batches[config.action_key]
            if one.estimator.startswith("ngram"):
                config = replace(config, epsilon=self._ngram(steps, config))
            more = {}
            if advantages.needs_hidden(one.estimator):
                key = config.epsilon, config.centroid, config.order
                if key not in labels:
                    labels[key] = _clusters(sample, steps, config)
                steps.cluster, more["bipace/r2"] = labels[key]
            described = self.described.setdefault(one, [])
            wanted = len(described) < DESCRIBED
            result = advantages.estimate(one.estimator, steps, config, diagnostics=wanted)
            out[one] = result.step.numpy(), result.total.numpy()
            if wanted:
                described.append(result.diagnostics | more)
        return out

    def described_as(self, one: Arm, name: str) -> float | None:
        """Mean over the first samples of a diagnostic, ``purity`` for example; None where the arm has none."""
        found = [d[f"bipace/{name}"] for d in self.described.get(one, []) if f"bipace/{name}" in d]
        return float(np.mean(found)) if found else None

    def epsilon_of(self, one: Arm) -> float | None:
        """The epsilon in force (the median accepted one, if calibrated); None for arms that use none."""
        if one in self.calibrated:
            accepted = [e for e in self.calibrated[one] if e is not None]
            return float(np.median(accepted)) if accepted else None
        if one.estimator.startswith("ngram"):
            return self._ngram_epsilon
        hidden = one.estimator not in REFERENCES and advantages.needs_hidden(one.estimator)
        return float(one.config(self.base).epsilon) if hidden else None

    def _pipeline(self, one: Arm, config: BipaceConfig, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        pipeline = CreditPipeline(one.estimator, config)
        credit = pipeline.run(sample.trajectories, sample.phi)
        scan = credit.calibration
        self.calibrated.setdefault(one, []).append(None if scan.refused else scan.epsilon)
        self.described.setdefault(one, []).append(credit.metrics)
        step = [credit.columns[source]["advantage_step"] for source in credit.sources]
        return np.array(step), credit.values.numpy()

    def _ngram(self, steps: StepBatch, config: BipaceConfig) -> float:
        if self._ngram_epsilon is None:
            self._ngram_epsilon = calibrate(vectors(steps.observation_text, config.ngram), steps, config).epsilon
        return self._ngram_epsilon

    def _reference(self, name: str, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        steps = advantages.from_trajectories(sample.trajectories, self.base)
        a, v, _ = exact(self.world, sample)
        step = a if name == TRUE_A else steps.ret.numpy() - v
        episode = advantages.estimate("grpo", steps, self.base, diagnostics=False).episode.numpy()
        return step, episode + self.base.w * step


def _clusters(sample: Sample, steps: StepBatch, config: BipaceConfig) -> tuple[torch.Tensor, float]:
    """Labels [N] and their leave-one-out R^2."""
    order = steps.order(config.order)
    found = cluster(sample.phi, steps.group, config.epsilon, centroid=config.centroid, order=order)
    return found.labels, leave_one_out_r2(found.labels, steps)


def exact(world: World, sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every turn [N]: the discounted advantage, the discounted value, the undiscounted advantage."""
    rows = sample.rows
    columns = []
    for task, turn, state, action in zip(rows.task, rows.turn, rows.state, rows.action, strict=True):
        d, u = world.truths[task].discounted, world.truths[task].undiscounted
        v = d.v[turn, state]
        columns.append((d.q[turn, state, action] - v, v, u.q[turn, state, action] - u.v[turn, state]))
    a, v, undiscounted = np.array(columns).T
    return a, v, undiscounted
