"""One pass over a group's hidden states: the specification's vectors, ties, bad rows, and plain loops as the judge."""

from __future__ import annotations

import math
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages import StepBatch
from openrlhf_bipace.clustering import BACKENDS, CENTROIDS, Clusters, backends, cluster
from openrlhf_bipace.config import BipaceConfig

R = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("reference.py"))))


@pytest.fixture(params=["reference", "exact"])
def backend(request) -> str:
    return request.param


def at(*degrees: float) -> torch.Tensor:
    """Unit vectors in the plane."""
    radians = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=1)


def labels(phi, epsilon: float, groups=None, **options) -> list[int]:
    return cluster(phi, [0] * len(phi) if groups is None else groups, epsilon, **options).labels.tolist()


@pytest.mark.parametrize(
    ("degrees", "centroid", "expected"),
    [
        ((20, 0, 40), "seed", [0, 0, 0]),  # both within 25.84 degrees of the seed
        ((20, 0, 40), "mean", [0, 0, 1]),  # the mean of 20 and 0 is 10, 30 degrees away from 40
        ((0, 20, 40), "seed", [0, 0, 1]),
        ((0, 20, 40), "mean", [0, 0, 1]),
    ],
)
def test_the_two_centroid_rules(degrees, centroid, expected, backend):
    assert labels(at(*degrees), 0.1, centroid=centroid, backend=backend) == expected


def test_the_nearest_centroid_wins_not_the_first(backend):
    for centroid in CENTROIDS:
        assert labels(at(0, 40, 25), 0.15, centroid=centroid, backend=backend) == [0, 1, 1]


def test_ties_go_to_the_older_cluster(backend):
    for centroid in CENTROIDS:
        assert labels(at(-20, 20, 0), 0.1, centroid=centroid, backend=backend) == [0, 1, 0]
        assert labels(at(20, -20, 0), 0.1, centroid=centroid, backend=backend) == [0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_duplicates_never_split(dtype, backend):
    gen = torch.Generator().manual_seed(0)
    distinct = torch.randn(5, 64, generator=gen)
    phi = distinct.repeat(20, 1).to(dtype)
    scale = torch.linspace(0.5, 4, 100)[:, None] if dtype == torch.float32 else 1
    for centroid in CENTROIDS:
        found = labels(phi * scale, 0.0, centroid=centroid, backend=backend)
        assert found == [0, 1, 2, 3, 4] * 20


def test_the_slack_covers_rounding_and_no_more(backend):
    edge = math.degrees(math.acos(1 - 0.1))
    assert labels(at(0, edge), 0.1, backend=backend) == [0, 0]
    assert labels(at(0, math.degrees(math.acos(1 - 0.1 - 9e-7))), 0.1, backend=backend) == [0, 0]
    assert labels(at(0, math.degrees(math.acos(1 - 0.1 - 1.1e-6))), 0.1, backend=backend) == [0, 1]


def test_length_does_not_matter(backend):
    phi = at(0, 10, 90) * torch.tensor([[1e200], [1e-200], [5.0]], dtype=torch.float64)
    assert labels(phi, 0.1, backend=backend) == [0, 0, 1]


def test_epsilon_two_takes_everything(backend):
    for centroid in CENTROIDS:
        assert labels(at(0, 180, 90, 270), 2.0, centroid=centroid, backend=backend) == [0] * 4


def test_groups_never_meet(backend):
    found = cluster(at(0, 0, 0, 90), [5, 9, 5, 9], 0.1, backend=backend)
    assert found.labels.tolist() == [0, 1, 0, 2]
    assert found.sizes.tolist() == [2, 1, 1] and found.leader.tolist() == [0, 1, 3]
    expected = {"backend": backend, "records": 4, "groups": 2, "clusters": 3}
    assert {name: found.stats[name] for name in expected} == expected and found.stats["seconds"] >= 0


def test_order_of_the_visit(backend):
    phi = at(0, 20, 40)
    found = cluster(phi, [0] * 3, 0.1, centroid="seed", order=[1, 0, 2], backend=backend)
    assert found.labels.tolist() == [0, 0, 0] and found.leader.tolist() == [1]
    backwards = cluster(phi, [0] * 3, 0.1, centroid="seed", order=torch.tensor([2, 1, 0]), backend=backend)
    assert backwards.labels.tolist() == [1, 0, 0]  # numbered as they were seeded
    assert backwards.leader.tolist() == [2, 0]


@pytest.mark.parametrize("centroid", CENTROIDS)
@pytest.mark.parametrize("order", ["turn", "trajectory"])
@pytest.mark.parametrize("seed", range(4))
def test_against_plain_loops(centroid, order, seed, backend):
    rows = R.random_rows(random.Random(seed), groups=3)
    steps = StepBatch(**R.columns(rows))
    gen = torch.Generator().manual_seed(seed)
    phi = torch.randn(4, 8, generator=gen, dtype=torch.float64)[torch.tensor([r["state"] for r in rows])]
    phi = phi + 0.4 * torch.randn(len(rows), 8, generator=gen, dtype=torch.float64)
    for epsilon in (0.0, 0.05, 0.2, 0.5):
        found = cluster(phi, steps.group, epsilon, centroid=centroid, order=steps.order(order), backend=backend)
        leader = found.leader[found.labels].tolist()
        assert leader == R.clusters(phi.tolist(), rows, epsilon, centroid, order)
        check_consistent(found, steps.group)


def check_consistent(found: Clusters, groups: torch.Tensor) -> None:
    assert found.labels.dtype == found.sizes.dtype == found.leader.dtype == torch.int64
    assert torch.equal(torch.bincount(found.labels), found.sizes)
    assert torch.equal(found.labels[found.leader], torch.arange(len(found.sizes)))
    assert torch.equal(groups[found.leader][found.labels], groups)


@pytest.mark.parametrize("centroid", CENTROIDS)
@pytest.mark.parametrize("seed", range(5))
def test_epsilon_zero_on_one_hot_observations_is_gigpo(centroid, seed, backend):
    rows = R.random_rows(random.Random(seed), groups=4)
    steps = StepBatch(**R.columns(rows))
    phi = torch.nn.functional.one_hot(steps.observation_key).float()
    config = BipaceConfig(epsilon=0.0)
    found = cluster(phi, steps.group, 0.0, centroid=centroid, order=steps.order(config.order), backend=backend)
    steps.cluster = found.labels
    for ours, exact in (("bigpo", "gigpo"), ("bipace_q", "pace_q"), ("bipace_diff", "pace_diff")):
        a, b = (advantages.estimate(name, steps, config) for name in (ours, exact))
        assert torch.equal(a.total, b.total) and torch.equal(a.branch, b.branch)


def test_empty_and_one_row(backend):
    empty = cluster(torch.zeros(0, 3), [], 0.1, backend=backend)
    assert empty.labels.shape == empty.sizes.shape == empty.leader.shape == (0,)
    assert empty.labels.dtype == torch.int64 and empty.stats["clusters"] == 0
    one = cluster(torch.ones(1, 3), [4], 0.1, backend=backend)
    assert (one.labels.tolist(), one.sizes.tolist(), one.leader.tolist()) == ([0], [1], [0])


def test_input_is_left_alone(backend):
    phi = at(0, 20, 40).numpy()
    before = phi.copy()
    assert labels(phi, 0.1, groups=np.array([1, 1, 1]), backend=backend) == [0, 0, 1]
    assert (phi == before).all()
    assert labels(torch.tensor(phi, requires_grad=True), 0.1, backend=backend) == [0, 0, 1]


@pytest.mark.parametrize(
    ("value", "kind"), [(0.0, "zero"), (math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")]
)
def test_a_bad_vector_is_named(value, kind):
    phi = torch.ones(3, 4)
    phi[1] = value
    steps = StepBatch(["g"] * 3, [0, 3, 3], [0, 5, 6], [0] * 3, [0] * 3, ["a"] * 3, ["o"] * 3)
    for names, who in (
        (None, "row 1"),
        (["a", "b", "c"], "b"),
        (steps.describe, "group g, trajectory 3, turn 5"),
    ):
        with pytest.raises(ValueError, match=f"phi: {kind} vector at {who}; a hidden state must be finite"):
            cluster(phi, [0, 0, 0], 0.1, names=names)


def test_one_bad_entry_is_enough():
    phi = torch.ones(20_000, 2)
    phi[19_999, 1] = math.nan
    with pytest.raises(ValueError, match="phi: NaN vector at row 19999"):
        cluster(phi, [0] * 20_000, 0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phi": torch.ones(3)}, r"phi: got shape \(3,\) of torch.float32, expected \[N, d\] of a float type"),
        ({"phi": torch.ones(2, 2, dtype=torch.int64)}, "phi: got shape .* of torch.int64"),
        ({"phi": torch.ones(2, 0)}, "phi: got vectors of dimension 0"),
        ({"group_ids": [0, 0, 0]}, r"group_ids: got shape \(3,\), expected \(2,\)"),
        ({"group_ids": [0.0, 1.0]}, "group_ids: got float32, expected integers"),
        ({"epsilon": -0.1}, r"epsilon: got -0.1, expected a cosine distance in \[0, 2\]"),
        ({"epsilon": 2.1}, "epsilon: got 2.1"),
        ({"epsilon": math.nan}, "epsilon: got nan"),
        ({"epsilon": "auto"}, "epsilon: got 'auto', .* resolved before"),
        ({"centroid": "median"}, r"centroid: got 'median', allowed: mean \| seed"),
        ({"backend": "magic"}, "backend: got 'magic', allowed: auto"),
        ({"order": [0, 0]}, r"order: got .*, expected a permutation of 0 \.\. 1"),
        ({"order": [0]}, "order: got"),
        ({"order": [0.0, 1.0]}, "order: got"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    given = {"phi": torch.ones(2, 2), "group_ids": [0, 0], "epsilon": 0.1} | arguments
    with pytest.raises(ValueError, match=message):
        cluster(given.pop("phi"), given.pop("group_ids"), given.pop("epsilon"), **given)


def test_auto_is_a_backend_that_exists():
    assert cluster(at(0, 0), [0, 0], 0.1).stats["backend"] in BACKENDS
    assert backends()[0] == "auto" and set(backends()[1:]) == set(BACKENDS)
