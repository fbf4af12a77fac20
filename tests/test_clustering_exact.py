"""`exact` (and everything built on it) against the float64 reference: label for label, on every input."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrlhf_bipace.clustering import CENTROIDS, BadVector, choose, cluster, lockstep, precision, seeds, sharded
from openrlhf_bipace.clustering.greedy import SLACK, greedy
from openrlhf_bipace.clustering.precision import Judge, mean_bound, pair_bound, unit32

exact = importlib.import_module("openrlhf_bipace.clustering.exact")
prefilter = importlib.import_module("openrlhf_bipace.clustering.prefilter")
approximate = importlib.import_module("openrlhf_bipace.clustering.approximate")

FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def chain(rng: np.random.Generator, n: int, d: int, epsilon: float, gap: float) -> np.ndarray:
    """Walks along great circles whose next neighbours are at epsilon + slack, give or take `gap`."""
    limit, rows = epsilon + SLACK, []
    while len(rows) < n:
        u, v = np.linalg.qr(rng.standard_normal((d, 2)))[0].T
        offset = rng.uniform(-gap, gap, size=12) + np.where(rng.random(12) < 0.5, 0, -0.3 * limit)
        angle = np.cumsum(np.arccos(np.clip(1 - (limit + offset), -1, 1)))
        rows += list(np.cos(angle)[:, None] * u + np.sin(angle)[:, None] * v)
    return rng.permutation(np.array(rows[:n]))


def lattice(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    """Small integers: many equal rows, parallel rows and exactly equal distances."""
    x = rng.integers(-1, 3, size=(n, d)).astype(float)
    x[(x == 0).all(axis=1), 0] = 1
    return x * rng.choice([1.0, 3.0, 0.125], size=(n, 1))


def cloud(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    """Noisy states around a common direction, some rows repeated."""
    centre = 1 + rng.standard_normal((max(n // 8, 1), d))
    x = centre[rng.integers(0, len(centre), n)] + 0.3 * rng.standard_normal((n, d))
    return x[rng.integers(0, n, n)] if n > 4 else x


@st.composite
def inputs(draw) -> tuple[torch.Tensor, np.ndarray, float]:
    """(phi, group ids, epsilon): every kind of trouble, mixed types, several groups."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, d = draw(st.integers(1, 260)), draw(st.sampled_from([2, 3, 5, 16, 70]))
    epsilon = draw(st.sampled_from([0.0, 0.02, 0.1, 0.25, 0.5, 1.0, 1.3, 2.0]))
    kind = draw(st.sampled_from(["chain", "lattice", "cloud"]))
    if kind == "chain":
        x = chain(rng, n, d, epsilon, draw(st.sampled_from([1e-6, 1e-8, 1e-4])))
    else:
        x = (lattice if kind == "lattice" else cloud)(rng, n, d)
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    groups = rng.integers(0, draw(st.sampled_from([1, 1, 3, 20])), n)
    return torch.from_numpy(x).to(dtype), groups, epsilon


def leaders(phi, groups, epsilon, **options) -> list[int]:
    found = cluster(phi, groups, epsilon, **options)
    return found.leader[found.labels].tolist()


@pytest.mark.parametrize("centroid", CENTROIDS)
@FAST
@given(data=inputs(), block=st.sampled_from([1, 2, 7, 64, 1000]), threads=st.sampled_from([1, 4]))
def test_exact_is_the_reference(centroid, data, block, threads):
    phi, groups, epsilon = data
    expected = leaders(phi, groups, epsilon, centroid=centroid, backend="reference")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exact, "BLOCK_ALONE", block)
            patch.setattr(exact, "BLOCK_TOGETHER", block)
            assert leaders(phi, groups, epsilon, centroid=centroid, backend="exact") == expected
    finally:
        torch.set_num_threads(before)


@FAST
@given(
    data=inputs(),
    block=st.sampled_from([1, 5, 64, 1000]),
    tile=st.sampled_from([1, 3, 2048]),
    dense=st.sampled_from([0.0, 1 / 64, 1.0]),
)
def test_blocks_of_seeds_and_the_prefilter_are_the_reference(data, block, tile, dense):
    phi, groups, epsilon = data
    expected = leaders(phi, groups, epsilon, centroid="seed", backend="reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "LARGE", 1)
        patch.setattr(prefilter, "DENSE", dense)
        patch.setattr(prefilter, "TILE", tile)
        patch.setattr(seeds, "BLOCK", block)
        patch.setattr(seeds, "TILE", tile)
        assert leaders(phi, groups, epsilon, centroid="seed", backend="exact") == expected
        patch.setattr(exact, "Prefilter", seeds.SeedBlocks)  # what runs on CUDA
        assert leaders(phi, groups, epsilon, centroid="seed", backend="exact") == expected
        assert leaders(phi, groups, epsilon, centroid="seed", backend="faiss-flat") == expected


@pytest.mark.parametrize("centroid", CENTROIDS)
@FAST
@given(data=inputs(), shards=st.sampled_from([1, 2, 5]), block=st.sampled_from([3, 32, 300]))
def test_shards_are_the_reference(centroid, data, shards, block):
    phi, _, epsilon = data
    expected = leaders(phi, np.zeros(len(phi), int), epsilon, centroid=centroid, backend="reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "MEAN_BLOCK", block)
        patch.setattr(sharded, "BLOCK", block)
        patch.setattr(seeds, "BLOCK", block)
        members = [sharded.Shard(phi.shape[1], epsilon, own, shards) for own in range(shards)]

        def call(number, settled):
            x = phi[number * block : (number + 1) * block]
            return [(m.products if centroid == "mean" else m.search)(x, settled) for m in members]

        found = sharded.find_sharded(phi, np.arange(len(phi)), epsilon, centroid, call, shards)
    assert found.tolist() == expected


@pytest.mark.parametrize("centroid", CENTROIDS)
def test_without_the_judge_the_chains_come_out_wrong(centroid, monkeypatch):
    """The inputs above bite: float32 alone disagrees with the reference, so equality is the judge's doing."""
    phi = torch.from_numpy(chain(np.random.default_rng(0), 600, 16, 0.1, 1e-7))
    options = {"centroid": centroid, "backend": "exact"}
    expected = leaders(phi, np.zeros(600, int), 0.1, centroid=centroid, backend="reference")
    assert leaders(phi, np.zeros(600, int), 0.1, **options) == expected
    for module in (lockstep, seeds):
        monkeypatch.setattr(module, "pair_bound", lambda d: 0.0)
    monkeypatch.setattr(lockstep, "mean_bound", lambda *a: 0.0)
    assert leaders(phi, np.zeros(600, int), 0.1, **options) != expected


@pytest.mark.parametrize("d", [3, 64, 1536])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_float32_cosines_stay_within_the_bound(d, dtype):
    gen = torch.Generator().manual_seed(d)
    scale = torch.logspace(-18, 18, 200, dtype=torch.float64)[:, None]
    phi = ((1 + torch.randn(200, d, generator=gen, dtype=torch.float64)) * scale).to(dtype)
    x, rows = unit32(phi, np.arange(200)), precision.unit_rows(phi, np.arange(200))
    error = np.abs((x @ x.T).double().numpy() - rows @ rows.T).max()
    assert 0 < error <= pair_bound(d)
    assert np.linalg.norm(x.double().numpy() - rows, axis=1).max() <= 4 * precision.U


def test_stored_means_stay_within_the_bound():
    rng = np.random.default_rng(0)
    phi = torch.from_numpy(cloud(rng, 3000, 24).astype(np.float32))
    judge, rows = Judge(phi, 0.1), np.arange(3000)
    steps = lockstep.Lockstep(phi, [rows], judge, mean=True, block=32)
    steps.run()
    x = precision.unit_rows(phi, rows)
    labels, k = steps.labels[0], int(steps.k[0])
    sums = np.zeros((k, 24))
    np.add.at(sums, labels, x)
    true = x @ (sums / np.linalg.norm(sums, axis=1, keepdims=True)).T
    ours = unit32(phi, rows) @ steps.sums[0, :k].T * torch.from_numpy(steps.inverse[0, :k])
    bound = mean_bound(24, 32, steps.updates, steps.spread)
    assert 0 < np.abs(ours.double().numpy() - true).max() <= bound < 1e-3
    assert 1 <= steps.spread <= 1 / (1 - 0.1 - SLACK) + 1e-6


def test_opposite_vectors_cancel_as_in_the_reference():
    """Epsilon 2 makes clusters whose sum vanishes: no direction, cosine 0 to everything; bounds are infinite there."""
    phi = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [1, 0], [0, -1], [-1, 1e-9], [1, 1]]).repeat(5, 1)
    for epsilon in (1.0, 1.5, 2.0):
        for centroid in CENTROIDS:
            options = {"centroid": centroid, "groups": np.zeros(35, int), "epsilon": epsilon}
            assert leaders(phi, backend="exact", **options) == leaders(phi, backend="reference", **options)


@pytest.mark.parametrize(("centroid", "rows"), [("seed", 1_000_000), ("mean", 20_000)])
def test_a_great_many_equal_rows_are_one_cluster(centroid, rows):
    found = cluster(torch.ones(rows, 4), np.zeros(rows, int), 0.0, centroid=centroid, backend="exact")
    assert found.sizes.tolist() == [rows] and found.leader.tolist() == [0]


def test_low_precision_elsewhere_does_not_leak_in():
    """A host may allow bfloat16 or TF32 products; inside they are float32, and outside the setting is back."""
    phi, groups = torch.from_numpy(cloud(np.random.default_rng(1), 900, 64)).float(), np.zeros(900, int)
    expected = leaders(phi, groups, 0.1, backend="reference")
    torch.set_float32_matmul_precision("medium")
    try:
        assert leaders(phi, groups, 0.1, backend="exact") == expected
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("kind", ["faiss-ivf", "faiss-hnsw"])
def test_approximate_backends_say_how_often_they_are_right(kind):
    phi = torch.from_numpy(cloud(np.random.default_rng(2), 4000, 32).astype(np.float32))
    groups = np.arange(4000) % 2
    found = cluster(phi, groups, 0.1, centroid="seed", backend=kind)
    true = cluster(phi, groups, 0.1, centroid="seed", backend="reference")
    same = (found.leader[found.labels] == true.leader[true.labels]).double().mean()
    assert same > 0.9 and 0.9 < found.stats["same_leader"] <= 1


def test_the_sampled_share_counts_wrong_leaders_and_needless_ones():
    phi, rows = torch.eye(3)[[0, 1, 2, 0, 1]], np.arange(5)
    blocks = approximate.IndexBlocks(phi, rows, Judge(phi, 0.1), "flat")
    positions = blocks.run()
    assert positions.tolist() == [0, 1, 2, 0, 1]
    assert blocks.same_leader(positions) == 1
    assert blocks.same_leader(np.array([0, 1, 2, 1, 1])) == pytest.approx(0.8)
    blocks.append(unit32(phi, rows[3:4]), np.array([3]))  # row 3 as a leader, though row 0 covers it
    assert blocks.same_leader(np.array([0, 1, 2, 3, 1])) == pytest.approx(0.8)


def test_faiss_needs_seeds_and_auto_is_exact():
    phi = torch.ones(3, 4)
    with pytest.raises(ValueError, match="backend: got 'faiss-ivf' with centroid 'mean', allowed: centroid 'seed'"):
        cluster(phi, [0, 0, 0], 0.1, backend="faiss-ivf")
    assert choose(phi) == "reference"
    assert choose(torch.ones(600, 4)) == "exact"


def test_bad_vectors_travel_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(BadVector("NaN", 7, "row 7")))
    assert (error.row, str(error)) == (7, "phi: NaN vector at row 7; a hidden state must be finite and not zero")


def test_the_reference_reports_nothing():
    assert greedy(torch.ones(1, 2), [np.array([0])], 0.1, "seed")[1] == {}
