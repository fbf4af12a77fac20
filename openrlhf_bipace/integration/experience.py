"""Experience makers: rollouts of our agent loop into what the policy trains on.

`StepExperienceMaker` serves our estimators: hidden states ride along the old-logprob forward, one advantage per turn
replaces token rewards, rows are distributed by a plan. `AgentExperienceMaker` leaves upstream's estimators alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.utils.logging_utils import init_logger

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages.pipeline import Credit, CreditPipeline
from openrlhf_bipace.integration.batches import join, part, place_on_ranks, row_item, write_advantages
from openrlhf_bipace.integration.clustering import ClusterPool, RemoteHidden, locate
from openrlhf_bipace.integration.hidden import HiddenStates
from openrlhf_bipace.integration.samples import pop_trajectories
from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.plan import PADDING, MicroBatch, micro_batches, optimizer_steps
from openrlhf_bipace.rollout.rows import Row, hidden_positions, training_rows

logger = init_logger(__name__)


class AgentExperienceMaker(RemoteExperienceMaker):
    """Upstream's maker and estimators; afterwards `trajectories` holds the rollouts in row order."""

    credit: Credit | None = None  # no step advantages here

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trajectories: list[Trajectory] = []

    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """Upstream's, with the trajectories taken out and empty rows made harmless."""
        self.trajectories = [t for samples in samples_list for t in pop_trajectories(samples)]
        refuse_if_none_counts(self.trajectories)
        experiences = super().make_experience(samples_list)
        for experience in experiences:
            zero_means_of_empty_rows(experience)
        return experiences


class StepExperienceMaker(RemoteExperienceMaker):
    """Our estimators: rows, forwards, advantages, and a plan that gives every rank the same number of micro-batches.

    After `make_experience_batch`, `trajectories` holds the rollouts and `credit` what the estimator made of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = self.args.bipace
        self.pipeline = CreditPipeline(self.advantage_estimator, self.config)
        self.reads_hidden = advantages.needs_hidden(self.advantage_estimator)
        self.ranks = self.args.actor.num_nodes * self.args.actor.num_gpus_per_node
        self._by_tokens = self.args.train.dynamic_batch_enable
        self.trajectories: list[Trajectory] = []
        self.credit: Credit | None = None
        self.batches = 0  # iterations so far; seeds the order of the optimizer steps
        self._positions: list[list[list[int]]] | None = None  # per micro-batch of the running forward, per row
        self._owners: list[list[int]] | None = None  # likewise: the clustering worker of each row
        self._hidden: list[HiddenStates] = []
        workers = self.config.cluster_workers if self.reads_hidden else 0
        self.pool = ClusterPool(workers, self.config.cluster_gpus) if workers else None

    @torch.no_grad()
    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Micro-batches for the policy ranks, rank after rank, as many for each, with their `Place` in ``info``."""
        self.trajectories = [pop_trajectories(sample)[0] for sample in rollout_samples]
        refuse_if_none_counts(self.trajectories)
        owners, rows = self._rows()
        items, seconds = self._score(owners, rows)
        start = time.perf_counter()
        phi = self._vectors()
        self.credit = self.pipeline.run(self.trajectories, phi)
        if self.reads_hidden:
            logger.info(f"clustering: {self.credit.clustering}")
        if self.reads_hidden and self.config.dump_hidden:
            for source, vector in zip(self.credit.sources, phi, strict=True):
                self.credit.columns[source]["hidden"] = vector.tolist()
        experiences = self._distribute(owners, rows, items)
        self.credit.metrics |= seconds
        clustering = self.credit.metrics.get("bipace/seconds_clustering", 0.0)
        self.credit.metrics["bipace/seconds_advantages"] = time.perf_counter() - start - clustering
        self.credit.metrics["health/entropy"] = sampled_entropy(items)
        return experiences

    def _rows(self) -> tuple[list[int], list[Row]]:
        """Every training row and the index of its trajectory; rollouts that do not count have none."""
        owners, rows = training_rows(self.trajectories)
        turns = sum(len(row.spans) for row in rows)
        logger.info(f"{len(rows)} rows, {turns} turns, {len(self.trajectories)} trajectories")
        return owners, rows

    def _score(self, owners: list[int], rows: list[Row]) -> tuple[list[Experience], dict[str, float]]:
        """Old (and reference) log-probabilities of every row, and each turn's hidden state in the same forward."""
        trajectories = [self.trajectories[i] for i in owners]
        items = [row_item(t, row) for t, row in zip(trajectories, rows, strict=True)]
        lengths = [len(row.tokens) for row in rows]
        plan = micro_batches(range(len(rows)), lengths, self.ranks, **self._limit(self.args.rollout))
        flat = [batch for batches in plan for batch in batches]
        if self.reads_hidden:
            where = [hidden_positions(r, t, self.config.position) for t, r in zip(trajectories, rows, strict=True)]
            self._positions = [[[] if row == PADDING else where[row] for row in batch] for batch in flat]
            if self.pool:
                owners_of_rows = self._assign(trajectories, rows)
                self._owners = [[0 if row == PADDING else owners_of_rows[row] for row in batch] for batch in flat]
        start = time.perf_counter()
        scored = self.make_experience(join(items, plan))
        seconds = {"phase/old_logprobs": time.perf_counter() - start}
        self._positions = self._owners = None
        for experience in scored:
            zero_means_of_empty_rows(experience)
        if self.reads_hidden:
            seconds["bipace/seconds_hidden"] = sum(h.seconds for h in self._hidden)
            if self.pool:
                turns = [len(row.spans) for row in rows]
                self._remote = RemoteHidden(self.pool, *locate(flat, self._hidden, owners_of_rows, turns, PADDING))
            else:
                self._by_row = self._vectors_by_row(flat, len(rows))
        return part(scored, plan, len(rows)), seconds

    def _vectors_by_row(self, flat: list[MicroBatch], count: int) -> list[torch.Tensor]:
        out: list[torch.Tensor | None] = [None] * count
        for batch, hidden in zip(flat, self._hidden, strict=True):
            for row, vectors in zip(batch, hidden.vectors, strict=True):
                if row != PADDING:
                    out[row] = vectors
        return out

    def _assign(self, trajectories: Sequence[Trajectory], rows: Sequence[Row]) -> list[int]:
        """The clustering worker of each row."""
        groups = ["" if self.config.scope == "batch" else t.group for t in trajectories]
        code = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        return self.pool.assign([code[group] for group in groups], [len(row.spans) for row in rows])

    def _vectors(self) -> torch.Tensor | RemoteHidden | None:
        """[turns, d], trajectory after trajectory: rows are in that order."""
        if self.pool:
            return self._remote
        return torch.cat(self._by_row) if self.reads_hidden else None

    def _distribute(self, owners: list[int], rows: list[Row], items: list[Experience]) -> list[Experience]:
        """Advantages onto tokens, rows onto optimizer steps, ranks and micro-batches."""
        rng = random.Random(f"{self.args.train.seed} steps {self.batches}")
        self.batches += 1
        steps = optimizer_steps(owners, len(self.trajectories), self.args.train.batch_size, rng)
        step_of_row = [0] * len(rows)
        for number, members in enumerate(steps):
            for row in members:
                step_of_row[row] = number
        write_advantages(items, rows, owners, self.credit, step_of_row, self.config.loss_agg)
        lengths = [len(row.tokens) for row in rows]
        per_rank = place_on_ranks(items, lengths, steps, self.ranks, self._limit(self.args.train))
        return [batch for mine in per_rank for batch in mine]

    def _limit(self, section: Any) -> dict[str, int]:
        if self._by_tokens:
            return {"max_tokens": section.max_tokens_per_gpu}
        return {"size": section.micro_batch_size}

    def _dispatch_forward(self, group: Any, sync_condition: bool, **kwargs: Any) -> Any:
        if self._positions is not None and group is self.actor_model_group:
            kwargs["positions"] = self._positions
            if self._owners is not None:
                kwargs["owners"] = self._owners
        return super()._dispatch_forward(group, sync_condition, **kwargs)

    def _flatten_results(self, refs: Any, duplicate_factor: int) -> list:
        results = super()._flatten_results(refs, duplicate_factor)
        if results and isinstance(results[0], tuple):
            self._hidden = [hidden for _, hidden in results]
            return [logprobs for logprobs, _ in results]
        return results


def zero_means_of_empty_rows(experience: Experience) -> None:
    """Upstream's per-row means are 0 / 0 for a row without action tokens; such a row has nothing to report."""
    empty = experience.action_mask.sum(-1) == 0
    for key in ("kl", "logprobs_diff"):
        experience.info[key] = experience.info[key].masked_fill(empty, 0.0)


def sampled_entropy(items: Sequence[Experience]) -> float:
    """Mean of -log pi over the response tokens, in nats: an unbiased estimate of the policy's entropy per token."""
    total = sum(float((item.action_log_probs * item.action_mask).sum()) for item in items)
    return -total / max(sum(int(item.action_mask.sum()) for item in items), 1)


def refuse_if_none_counts(trajectories: Sequence[Trajectory]) -> None:
    """RuntimeError, with the first error, when no rollout of an iteration can be learned from."""
    if any(t.counts for t in trajectories):
        return
    errors = [t.error for t in trajectories if t.end.failed]
    if errors:
        raise RuntimeError(f"no rollout of this iteration counts: {len(errors)} failed, the first with: {errors[0]}")
    raise RuntimeError(
        "no rollout of this iteration counts: not one token was generated; --data.max_len leaves no room for a "
        "response to the first prompt"
    )
