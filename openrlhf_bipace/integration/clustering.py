"""Clustering on Ray workers: hidden states stay in the object store, the driver sees row numbers and labels.

A policy rank puts the vectors of a micro-batch into the object store, one object per worker that will want them
(`cluster_worker.publish`). The driver learns references and counts, says who clusters what (`RemoteHidden.cluster`)
and gets leaders back. A group of more than `split` rows goes to all workers at once (`clustering.sharded`). A worker
that dies is replaced and its part is done again; the vectors are the policy's, so they are still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from openrlhf_bipace.clustering import BadVector, Clusters, from_leaders, rows_by_group
from openrlhf_bipace.clustering.sharded import block_size
from openrlhf_bipace.integration.cluster_worker import ClusterWorker, HiddenRefs

SPLIT_ROWS = 2**18  # rows of a group from which it is split: 1.8 GB in float32 at d = 1,536
PLACING = 180  # seconds in which Ray must have started all workers
RETRIES = 3  # rounds in which workers may die before the run does


class ClusterPool:
    """The driver's side: `workers` actors, replaced when they die.

    Args:
        gpus: of each worker, may be a fraction. split: rows of a group from which all workers share it.
    """

    def __init__(self, workers: int, gpus: float = 0.0, split: int = SPLIT_ROWS) -> None:
        self.gpus, self.split = gpus, split
        self.workers = [self._start() for _ in range(workers)]
        self.replaced = 0
        self._keys = 0
        try:
            ray.get([worker.pid.remote() for worker in self.workers], timeout=PLACING)
        except GetTimeoutError:
            raise RuntimeError(
                f"--bipace.cluster_workers: got {workers} with --bipace.cluster_gpus {gpus}: Ray could not place them "
                f"within {PLACING} s; the cluster has {ray.cluster_resources()}, free are {ray.available_resources()}"
            ) from None

    def _start(self) -> Any:
        actor = ray.remote(ClusterWorker)
        return actor.options(num_cpus=0, num_gpus=self.gpus, scheduling_strategy="SPREAD").remote()

    def assign(self, groups: Sequence[int], turns: Sequence[int]) -> list[int]:
        """The worker of each training row: groups stay together, the largest first to the least laden worker.

        Args:
            groups: per row, a code of what a part may not cross. turns: per row, its turns.
        """
        load = np.bincount(np.asarray(groups), weights=np.asarray(turns))
        laden, owner = np.zeros(len(self.workers)), np.zeros(len(load), dtype=np.int64)
        for group in np.argsort(-load, kind="stable"):
            owner[group] = laden.argmin()
            laden[owner[group]] += load[group]
        return owner[np.asarray(groups)].tolist()

    def next_key(self) -> int:
        """A name for the vectors of an iteration."""
        self._keys += 1
        return self._keys

    def attempt(self, submit: Callable[[], Any]) -> Any:
        """`submit()`; workers found dead are replaced and it runs again, `RETRIES` times at most (RuntimeError)."""
        for _ in range(RETRIES):
            try:
                return submit()
            except RayError as error:
                if not self._replace_dead() and not _caused_by_death(error):
                    raise
        raise RuntimeError(f"--bipace.cluster_workers: clustering workers died in {RETRIES} rounds one after another")

    def _replace_dead(self) -> int:
        dead = [i for i, worker in enumerate(self.workers) if not _alive(worker)]
        for i in dead:
            self.workers[i] = self._start()
        self.replaced += len(dead)
        return len(dead)


def _alive(worker: Any) -> bool:
    try:
        ray.get(worker.pid.remote())
    except RayActorError:
        return False
    return True


def _caused_by_death(error: RayError) -> bool:
    return isinstance(error, RayActorError) or (isinstance(error, RayTaskError) and isinstance(error.cause, RayError))


class RemoteHidden:
    """N hidden states in the object store; `cluster` stands for `clustering.cluster` of their matrix.

    Args:
        refs: objects of [m, d] vectors. where: [N, 2] (object, row) of each turn. owner: [N] the turn's worker.
    """

    def __init__(self, pool: ClusterPool, refs: list[Any], where: np.ndarray, owner: np.ndarray) -> None:
        self.pool, self.refs, self.where, self.owner = pool, refs, where, owner
        self.key = pool.next_key()

    def __len__(self) -> int:
        return len(self.where)

    def cluster(
        self, group_ids: torch.Tensor, epsilon: float, *, order: Any, names: Callable[[int], str], **options: Any
    ) -> Clusters:
        """As `clustering.cluster`, label for label, whatever the number of workers."""
        start, replaced = time.perf_counter(), self.pool.replaced
        visit = torch.as_tensor(order).numpy()
        groups = rows_by_group(torch.as_tensor(group_ids).numpy(), visit)
        leader, figures = np.empty(len(self), dtype=np.int64), {"workers": len(self.pool.workers)}
        whole = [rows for rows in groups if len(rows) <= self.pool.split or len(self.pool.workers) == 1]
        jobs = self._jobs(whole)
        for i, (leaders, stats) in self._find(jobs, {"epsilon": epsilon, **options}, names).items():
            rows = jobs[i][0]
            leader[rows] = rows[leaders]
            figures |= {"backend": stats["backend"], "judged": figures.get("judged", 0) + stats.get("judged", 0)}
        for rows in groups:
            if len(rows) > self.pool.split and len(self.pool.workers) > 1:
                leader[rows] = rows[self._split(rows, epsilon, options["centroid"], names)]
                figures["split_groups"] = figures.get("split_groups", 0) + 1
        out = from_leaders(leader, visit)
        out.stats = {
            "records": len(self),
            "groups": len(groups),
            "clusters": len(out.sizes),
            "replaced_workers": self.pool.replaced - replaced,
            "seconds": time.perf_counter() - start,
            **figures,
        }
        return out

    def _jobs(self, groups: list[np.ndarray]) -> dict[int, tuple[np.ndarray, list[Any]]]:
        """Worker -> (its rows, its arguments of `ClusterWorker.find` but the options)."""
        mine: dict[int, list[np.ndarray]] = {}
        for rows in groups:
            mine.setdefault(int(self.owner[rows[0]]), []).append(rows)
        jobs = {}
        for worker, parts in mine.items():
            rows, codes = np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            jobs[worker] = rows, [self.key, *self._local(rows), codes]
        return jobs

    def _local(self, rows: np.ndarray) -> tuple[list[Any], np.ndarray]:
        """(the objects that hold `rows`, [n, 2] where in them)."""
        objects, slot = np.unique(self.where[rows, 0], return_inverse=True)
        return [self.refs[i] for i in objects], np.stack([slot, self.where[rows, 1]], axis=1)

    def _find(self, jobs: dict[int, tuple[np.ndarray, list[Any]]], options: dict[str, Any], names: Any) -> dict:
        done: dict[int, Any] = {}

        def submit() -> None:
            workers = self.pool.workers
            pending = {i: workers[i].find.remote(*args, options) for i, (_, args) in jobs.items() if i not in done}
            failed = None
            for i, ref in pending.items():
                try:
                    done[i] = ray.get(ref)
                except RayActorError as error:
                    failed = error
            if failed:
                raise failed

        self.pool.attempt(submit)
        for i, found in done.items():
            _raise_bad(found, jobs[i][0], names)
        return done

    def _split(self, rows: np.ndarray, epsilon: float, centroid: str, names: Any) -> np.ndarray:
        """Position that leads each of `rows`, found by all workers together."""
        size = block_size(centroid)
        blocks = -(-len(rows) // size)

        def submit() -> Any:
            workers = self.pool.workers
            ends = [blocks * (i + 1) // len(workers) * size for i in range(len(workers))]
            shares = [(w, s) for w, s in zip(workers, np.split(rows, ends[:-1]), strict=True) if len(s)]
            packed = ray.get([w.pack.remote(*self._local(share), size) for w, share in shares])
            for found, (_, share) in zip(packed, shares, strict=True):
                _raise_bad(found, share, names)
            refs = [ref for part in packed for ref in part]
            return ray.get(workers[0].lead.remote(refs, len(rows), epsilon, centroid, workers[1:]))

        return self.pool.attempt(submit)


def _raise_bad(found: Any, rows: np.ndarray, names: Callable[[int], str]) -> None:
    if isinstance(found, BadVector):
        row = int(rows[found.row])
        raise BadVector(found.kind, row, names(row))


def locate(
    batches: Sequence[Sequence[int]],
    hidden: Sequence[HiddenRefs],
    owners: Sequence[int],
    turns: Sequence[int],
    padding: int,
) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """(objects, [N, 2] where, [N] worker) of every turn, row after row.

    Args:
        batches: rows of each micro-batch, or `padding`. hidden: what its forward said.
        owners: per row, its worker. turns: per row, its turns.
    """
    refs: list[Any] = []
    where: dict[int, np.ndarray] = {}
    for batch, said in zip(batches, hidden, strict=True):
        number = {own: len(refs) + i for i, own in enumerate(said.refs)}
        refs += said.refs.values()
        taken = dict.fromkeys(number, 0)
        for row in batch:
            if row != padding:
                own, count = owners[row], turns[row]
                at = np.arange(taken[own], taken[own] + count)
                where[row] = np.stack([np.full(count, number[own]), at], axis=1)
                taken[own] += count
    return refs, np.concatenate([where[row] for row in range(len(turns))]), np.repeat(owners, turns)
