"""Clustering on Ray workers: exact whatever their number, a dead one costs seconds, vectors never reach the driver."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import torch

from openrlhf_bipace.clustering import CENTROIDS, cluster

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module", autouse=True)
def ray():
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=256 * 2**20, logging_level="ERROR")
    yield ray
    ray.shutdown()


def records(groups: int, rows: int, d: int = 32, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """Noisy states of several groups, rows shuffled."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(groups), rows))
    centre = rng.standard_normal((rows // 4 + 1, d))
    x = centre[rng.integers(0, len(centre), len(group))] + 0.35 * rng.standard_normal((len(group), d))
    return torch.from_numpy(x.astype(np.float32)), group


def scattered(pool, phi: torch.Tensor, group: np.ndarray, batch: int = 50):
    """The rows as a policy rank publishes them, micro-batch after micro-batch, one row per turn."""
    from openrlhf_bipace.integration.cluster_worker import HiddenRefs, publish
    from openrlhf_bipace.integration.clustering import RemoteHidden, locate

    owners = pool.assign(group.tolist(), [1] * len(group))
    batches = [list(range(s, min(s + batch, len(group)))) for s in range(0, len(group), batch)]
    said = [HiddenRefs(publish([phi[i : i + 1] for i in b], [owners[i] for i in b]), 0.0) for b in batches]
    return RemoteHidden(pool, *locate(batches, said, owners, [1] * len(group), padding=-1))


def test_vectors_of_two_lengths_are_refused(ray):
    from openrlhf_bipace.integration.cluster_worker import Gatherer

    gatherer = Gatherer([ray.put(np.ones((2, d), np.float32)) for d in (3, 3, 5)], np.array([[0, 1], [1, 0], [2, 0]]))
    assert gatherer[torch.tensor([0, 1])].shape == (2, 3)
    with pytest.raises(ValueError, match=r"got vectors of \[3, 5\] dimensions"):
        gatherer[torch.tensor([1, 2])]


def leaders(found) -> list[int]:
    return found.leader[found.labels].tolist()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_nothing(workers):
    from openrlhf_bipace.integration.clustering import ClusterPool

    phi, group = records(2, 1100)
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(group)))
    for split in (10**9, 1000):  # whole groups, and every group shared by all workers
        pool = ClusterPool(workers, split=split)
        remote = scattered(pool, phi, group)
        for centroid in CENTROIDS:
            options = {"centroid": centroid, "backend": "auto", "order": order, "names": str}
            found = remote.cluster(torch.from_numpy(group), 0.1, **options)
            expected = cluster(phi, group, 0.1, **options | {"backend": "reference"})
            assert torch.equal(found.labels, expected.labels) and torch.equal(found.leader, expected.leader)
            assert len(expected.sizes) not in (2, len(phi))
            assert found.stats["workers"] == workers
            assert found.stats.get("split_groups", 0) == (2 if workers > 1 and split == 1000 else 0)


def test_bfloat16_travels_unchanged():
    from openrlhf_bipace.integration.clustering import ClusterPool

    phi, group = records(2, 60)
    phi = phi.bfloat16()
    options = {"centroid": "mean", "backend": "exact", "order": torch.arange(len(group)), "names": str}
    remote = scattered(ClusterPool(2), phi, group)
    assert leaders(remote.cluster(torch.from_numpy(group), 0.1, **options)) == leaders(
        cluster(phi, group, 0.1, **options)
    )


def test_a_bad_vector_is_named_by_its_row_on_the_driver():
    from openrlhf_bipace.integration.clustering import ClusterPool

    phi, group = records(4, 30)
    phi[77] = float("nan")
    for split in (10**9, 10):
        remote = scattered(ClusterPool(2, split=split), phi, group)
        with pytest.raises(ValueError, match="NaN vector at the row called 77"):
            remote.cluster(
                torch.from_numpy(group), 0.1, centroid="mean", backend="auto", order=torch.arange(len(group)),
                names=lambda row: f"the row called {row}",
            )  # fmt: skip


@pytest.mark.parametrize("split", [10**9, 1000])
def test_a_worker_killed_in_the_middle_costs_seconds(ray, split):
    """The pool replaces it and does its part again; nobody else notices."""
    from openrlhf_bipace.integration.clustering import ClusterPool

    phi, group = records(2, 6000, d=64)
    pool = ClusterPool(2, split=split)
    remote = scattered(pool, phi, group, batch=500)
    options = {"centroid": "mean", "backend": "exact", "order": torch.arange(len(group)), "names": str}
    start = time.perf_counter()
    expected = leaders(remote.cluster(torch.from_numpy(group), 0.05, **options))
    undisturbed = time.perf_counter() - start
    remote.key = pool.next_key()
    victim = ray.get(pool.workers[1].pid.remote())
    killer = threading.Timer(undisturbed / 3, os.kill, (victim, signal.SIGKILL))
    killer.start()
    start = time.perf_counter()
    found = remote.cluster(torch.from_numpy(group), 0.05, **options)
    killer.join()
    assert leaders(found) == expected
    assert found.stats["replaced_workers"] == 1 and ray.get(pool.workers[1].pid.remote()) != victim
    assert time.perf_counter() - start < 60


def test_bytes_through_the_driver_do_not_grow_with_d(monkeypatch):
    """Everything the driver sends to or gets from workers, and what a forward returns, pickled and measured."""
    import ray
    from ray import cloudpickle

    from openrlhf_bipace.integration import clustering

    def traffic(d: int) -> tuple[int, int]:
        phi, group = records(3, 40, d=d)
        phi = torch.nn.functional.pad(phi[:, :8], (0, d - 8))  # the same labels for every d
        pool = clustering.ClusterPool(2)
        remote = scattered(pool, phi, group)
        said = len(cloudpickle.dumps([remote.refs, remote.where, remote.owner]))
        got, real = [], ray.get
        with monkeypatch.context() as patch:
            patch.setattr(clustering.ray, "get", lambda *a, **k: got.append(real(*a, **k)) or got[-1])
            options = {"centroid": "mean", "backend": "auto", "order": torch.arange(len(group)), "names": str}
            remote.cluster(torch.from_numpy(group), 0.1, **options)
        sent = len(
            cloudpickle.dumps(
                [args for _, args in remote._jobs(clustering.rows_by_group(group, np.arange(120))).values()]
            )
        )
        assert any(isinstance(x, tuple) and len(x[0]) for x in got)
        return said + sent, len(pickle.dumps([x[0] for x in got if isinstance(x, tuple)]))

    narrow, wide = traffic(8), traffic(4096)
    assert wide[1] == narrow[1]
    assert abs(wide[0] - narrow[0]) < 100 < narrow[0]  # references and numbers, a few bytes longer or shorter


def test_rows_of_several_turns_are_found_where_they_were_put():
    """Micro-batches in any order, padding rows between, several rows of one worker in one object."""
    from openrlhf_bipace.integration.cluster_worker import Gatherer, HiddenRefs, publish
    from openrlhf_bipace.integration.clustering import locate

    turns, owners = [2, 1, 3, 1, 2, 0], [0, 1, 0, 1, 1, 0]
    rows = [torch.full((n, 4), float(i)) + torch.arange(n)[:, None] / 10 for i, n in enumerate(turns)]
    batches, padding = [[3, 0, -1], [1, 5], [-1, 4, 2]], torch.zeros(0, 4)
    said = []
    for batch in batches:
        own = [0 if row < 0 else owners[row] for row in batch]
        said.append(HiddenRefs(publish([padding if row < 0 else rows[row] for row in batch], own), 0.0))
    refs, where, owner = locate(batches, said, owners, turns, padding=-1)
    assert torch.equal(Gatherer(refs, where)[torch.arange(9)], torch.cat(rows))
    assert owner.tolist() == [0, 0, 1, 0, 0, 0, 1, 1, 1]
    assert [len(h.refs) for h in said] == [2, 2, 2]


def test_groups_stay_together_and_the_load_is_even():
    from openrlhf_bipace.integration.clustering import ClusterPool

    owner = ClusterPool(2).assign([0, 1, 2, 0, 1, 2, 3], [5, 3, 1, 5, 3, 1, 2])
    assert owner == [0, 1, 1, 0, 1, 1, 1]  # 10 against 6 + 2 + 2


def test_a_training_run_with_workers(tiny, rooms_tasks, helpers, tmp_path):
    """The real stack, two policy ranks, epsilon calibrated on the workers: the labels that one process finds."""
    import json

    found = []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        out.mkdir()
        flags = helpers.base_flags(tiny.folder, rooms_tasks.train, out) | {
            "bipace.epsilon": "auto",
            "bipace.min_r2": -10,
            "bipace.cluster_workers": workers,
            "actor.num_gpus_per_node": 2,
            "ckpt.save_steps": -1,
        }
        output = helpers.run_module("openrlhf_bipace.cli.train_ppo_ray", helpers.argv(flags), out)
        assert ("'workers': 2" in output) == (workers == 2)
        lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
        found.append([line for line in lines if "agent/success" in line][0])
    for name in ("clusters", "epsilon", "r2", "cluster_size_mean", "matched_pairs", "rows_pace"):
        assert found[0][f"bipace/{name}"] == pytest.approx(found[1][f"bipace/{name}"])
