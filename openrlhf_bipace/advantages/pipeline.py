"""From one iteration's rollouts and hidden states to one value per turn: what the trainer and the lab both call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages.calibration import Calibration, Evidence, calibrate, cluster_steps, leave_one_out_r2
from openrlhf_bipace.advantages.diagnostics import warnings
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.records import Trajectory


@dataclass(slots=True)
class Credit:
    """One iteration's advantages, one entry per turn that counts (failed and empty trajectories have none)."""

    sources: list[tuple[int, int]]  # [N] (index in the list of trajectories, index in its steps)
    values: torch.Tensor  # [N] float64, the advantage of every response token of that turn
    columns: dict[tuple[int, int], dict[str, Any]]  # per source, for the rollout dump
    metrics: dict[str, float]  # diagnostics and seconds, flat names "bipace/..."
    warnings: list[str] = field(default_factory=list)
    calibration: Calibration | None = None  # of this iteration, with --bipace.epsilon auto until it has settled
    clustering: dict[str, Any] = field(default_factory=dict)  # `Clusters.stats`: backend, records, ...


class CreditPipeline:
    """Applies one estimator to iteration after iteration and remembers what `--bipace.epsilon auto` has seen.

    Args:
        estimator: a name of `advantages.names()`.
        config: every option of the estimator.
    """

    def __init__(self, estimator: str, config: BipaceConfig) -> None:
        advantages.check(estimator, config)
        self.estimator, self.config = estimator, config
        self.epsilon = None if config.epsilon == "auto" else float(config.epsilon)  # None: not settled yet
        self.evidence: Evidence | None = None  # of the scans so far

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on as if never stopped: plain numbers."""
        return {"epsilon": self.epsilon, "evidence": asdict(self.evidence) if self.evidence else None}

    def restore(self, state: dict[str, Any]) -> None:
        """With --bipace.epsilon auto, take up what `state` of an earlier part of the run says."""
        if self.config.epsilon == "auto":
            self.epsilon = state.get("epsilon")
            self.evidence = Evidence(**state["evidence"]) if state.get("evidence") else None

    def run(self, trajectories: Sequence[Trajectory], phi: Any = None) -> Credit:
        """Advantages of `trajectories`.

        Args:
            trajectories: whole prompt groups, in any order.
            phi: [N, d] hidden states of the turns that count, trajectory after trajectory, turns in order; read only
                by estimators that compare hidden states. Or an object of length N with a method `cluster` as
                `clustering.cluster` without its first argument, for vectors that stay elsewhere.

        Raises:
            ValueError: `phi` is missing, has another number of rows, or holds a bad vector (named by group, trajectory
                and turn).
        """
        steps = advantages.from_trajectories(trajectories, self.config)
        metrics: dict[str, float] = {}
        estimator, calibration = self.estimator, None
        figures: dict[str, Any] = {}
        if advantages.needs_hidden(self.estimator):
            if phi is None or len(phi) != len(steps):
                got = "none" if phi is None else str(len(phi))
                raise ValueError(f"{self.estimator} needs a hidden state for each of {len(steps)} turns, got {got}")
            start = time.perf_counter()
            calibration, figures = self._cluster(steps, phi, metrics)
            metrics["bipace/seconds_clustering"] = time.perf_counter() - start
            if calibration is not None and calibration.refused:
                estimator = advantages.state_only(estimator)
        start = time.perf_counter()
        result = advantages.estimate(estimator, steps, self.config)
        metrics["bipace/seconds_advantages"] = time.perf_counter() - start
        metrics |= result.diagnostics
        sources = list(zip(steps.source_trajectory.tolist(), steps.source_step.tolist(), strict=True))
        complaints = warnings(metrics)
        if calibration is not None and calibration.refused:
            complaints.append(f"{calibration.warning()}; this iteration uses {estimator}")
        columns = _columns(sources, steps, result)
        return Credit(sources, result.total, columns, metrics, complaints, calibration, figures)

    def _cluster(self, steps: Any, phi: Any, metrics: dict[str, float]) -> tuple[Calibration | None, dict[str, Any]]:
        """Label the steps, after a scan for epsilon while it is open. Returns the scan and the clusterer's figures."""
        if self.epsilon is None:
            calibration = calibrate(phi, steps, self.config, before=self.evidence)
            self.evidence = calibration.evidence
            steps.cluster = calibration.clusters.labels
            metrics |= calibration.diagnostics()
            if calibration.settled:
                self.epsilon = calibration.epsilon
            return calibration, calibration.clusters.stats
        found = cluster_steps(phi, steps, self.config, self.epsilon)
        steps.cluster = found.labels
        metrics["bipace/epsilon"] = self.epsilon
        metrics["bipace/r2"] = leave_one_out_r2(found.labels, steps, self.config.scope)
        return None, found.stats


def _columns(sources: list[tuple[int, int]], steps: Any, result: Any) -> dict[tuple[int, int], dict[str, Any]]:
    clusters = [None] * len(sources) if steps.cluster is None else steps.cluster.tolist()
    rows = zip(
        sources,
        steps.action_key.tolist(),
        steps.ret.tolist(),
        clusters,
        result.branch.tolist(),
        result.episode.tolist(),
        result.step.tolist(),
        result.total.tolist(),
        strict=True,
    )
    return {
        source: {
            "key": steps.action_names[key],
            "return": ret,
            "cluster": label,
            "branch": advantages.Branch(branch).name,
            "advantage_episode": episode,
            "advantage_step": step,
            "advantage": total,
        }
        for source, key, ret, label, branch, episode, step, total in rows
    }
