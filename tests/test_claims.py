"""The paper's claims, exactly: what holds, under which conditions, with which constants. docs/oracle.md explains them.

1. Epsilon 0 with one-hot embeddings is GiGPO.
2. Q-style is unbiased under the exact partition: given the actions; otherwise up to a factor that goes to 1.
3. Bias grows at most linearly in epsilon under a Lipschitz value function: in the cosine distance itself, with seed
   centroids. A function that is Lipschitz in the angle gets the square root.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages import StepBatch
from openrlhf_bipace.advantages.pipeline import CreditPipeline
from openrlhf_bipace.clustering import cluster
from openrlhf_bipace.clustering.greedy import SLACK
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.lab.oracle import plan, world
from openrlhf_bipace.lab.oracle.geometry import GEOMETRIES
from openrlhf_bipace.lab.oracle.gradient import Compass
from openrlhf_bipace.lab.oracle.sample import Sampler


@pytest.fixture(scope="module")
def rooms() -> world.World:
    labels = plan.tasks(7, wordings=2)[4:]  # two of them are easy
    return world.tabular(labels, GEOMETRIES["healthy"], gamma=0.95, horizon=10, seed=0)


# 1. GiGPO is the limit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"), [("bigpo", "gigpo"), ("bipace_q", "pace_q"), ("bipace_diff", "pace_diff")]
)
def test_epsilon_zero_with_one_hot_observations_is_gigpo(rooms, ours, theirs):
    """Through the trainer's own pipeline, on rollouts of a real environment."""
    rollouts = Sampler(rooms, groups=8, seed=3).draw(0).trajectories
    config = BipaceConfig(epsilon=0.0)
    seen = advantages.from_trajectories(rollouts, config).observation_key
    one_hot = torch.nn.functional.one_hot(seen).double()
    a, b = CreditPipeline(ours, config).run(rollouts, one_hot), CreditPipeline(theirs, config).run(rollouts)
    assert torch.equal(a.values, b.values)
    assert a.values.abs().max() > 0


# 2. Bias under the exact partition -------------------------------------------------------------------------------

PI, Q = np.array([0.5, 0.3, 0.2]), np.array([0.9, 0.4, 0.1])  # one state: probabilities and means of three actions
ADVANTAGE = Q - PI @ Q


def enumerate_part(n: int):
    """Every outcome of a part of `n` members with 0/1 returns: actions and returns [outcomes, n], probability."""
    actions = np.array(list(itertools.product(range(3), repeat=n)))
    returns = np.array(list(itertools.product((0.0, 1.0), repeat=n)))
    a, r = np.repeat(actions, len(returns), axis=0), np.tile(returns, (len(actions), 1))
    return a, r, PI[a].prod(axis=1) * np.where(r == 1, Q[a], 1 - Q[a]).prod(axis=1)


def values_of(name: str, actions: np.ndarray, returns: np.ndarray, **options) -> np.ndarray:
    """Step advantages [outcomes, n], every outcome a group of its own."""
    m, n = actions.shape
    flat = actions.ravel()
    steps = StepBatch(
        group=np.repeat(np.arange(m), n),
        trajectory=np.tile(np.arange(n), m),
        turn=np.zeros(m * n, dtype=int),
        ret=returns.ravel(),
        score=returns.ravel(),
        action_key=flat,
        observation_key=np.zeros(m * n, dtype=int),
        state_key=np.zeros(m * n, dtype=int),
    )
    return advantages.estimate(name, steps, BipaceConfig(**options)).step.numpy().reshape(m, n)


def mean_by_action(name: str, n: int, **options) -> np.ndarray:
    """[3] exact expectation of a member's step advantage given its own action."""
    a, r, p = enumerate_part(n)
    value = values_of(name, a, r, **options)[:, 0]
    return np.array([(p * value)[a[:, 0] == k].sum() / p[a[:, 0] == k].sum() for k in range(3)])


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_q_style_is_unbiased_up_to_a_factor(n):
    """The member is part of its own baseline: (1 - 1/n) A. Leave-one-out of a lone action returns some of it."""
    shrunk = (1 - 1 / n) * ADVANTAGE
    assert mean_by_action("state_q", n, fallback="q") == pytest.approx(shrunk)
    assert mean_by_action("state_q", n, fallback="q", peers="exclusive") == pytest.approx(shrunk)
    assert mean_by_action("state_v", n) == pytest.approx(shrunk)
    rloo = ADVANTAGE * (1 - 1 / n + (1 - PI) ** (n - 2) / n)
    assert mean_by_action("state_q", n) == pytest.approx(rloo)
    assert mean_by_action("state_q", n, single_key="rloo") == pytest.approx(rloo)


@pytest.mark.parametrize("n", [3, 5])
def test_the_other_rules_are_biased_by_action(n):
    """Dropping lone actions hides rare ones; diff-peer magnifies frequent ones, however large n."""
    dropped = (1 - 1 / n) * ADVANTAGE * (1 - (1 - PI) ** (n - 2))
    assert mean_by_action("state_q", n, fallback="zero") == pytest.approx(dropped)
    assert mean_by_action("state_diff", n) == pytest.approx(ADVANTAGE * (1 - PI ** (n - 1)) / (1 - PI))


def test_given_the_actions_q_style_is_exactly_unbiased():
    """For the advantage against the actions that were taken, not against the policy."""
    n = 4
    a, r, p = enumerate_part(n)
    value = values_of("state_q", a, r, fallback="q")
    for taken in ((0, 0, 1, 2), (1, 1, 1, 0), (2, 2, 2, 2)):
        rows = (a == taken).all(axis=1)
        expected = (p[rows, None] * value[rows]).sum(axis=0) / p[rows].sum()
        assert expected == pytest.approx(Q[list(taken)] - Q[list(taken)].mean())


def test_q_style_has_the_smaller_variance():
    """Averaging the returns of one action keeps the mean (above) and loses variance."""
    a, r, p = enumerate_part(5)
    error = {}
    for name in ("state_q", "state_v"):
        value = values_of(name, a, r, fallback="q")[:, 0]
        error[name] = [p[a[:, 0] == k] @ (value[a[:, 0] == k] - ADVANTAGE[k]) ** 2 for k in range(3)]
    assert np.all(np.array(error["state_q"]) < 0.95 * np.array(error["state_v"]))
    assert sum(error["state_q"]) < 0.6 * sum(error["state_v"])


def test_with_action_only_responses_q_and_v_are_the_same_gradient(rooms):
    """Members of a part share state, action and so the score: only the sum of their advantages matters."""
    samples = [Sampler(rooms, groups=8, seed=1).draw(k) for k in range(3)]
    for sample in samples:
        batch = np.zeros(len(sample.rows.task), dtype=int)
        compass = Compass(rooms, rooms.reasoning[world.ACTION], sample.rows, batch)
        steps = advantages.from_trajectories(sample.trajectories, BipaceConfig())
        v, q = (
            advantages.estimate(name, steps, BipaceConfig(fallback="q")).step.numpy()
            for name in ("state_v", "state_q")
        )
        assert np.abs(v - q).max() > 0.01
        assert compass.directions(v - q).gram[0, 0] < 1e-20 * compass.directions(v).gram[0, 0]


# 3. Bias against epsilon -----------------------------------------------------------------------------------------


def on_circle(angles: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], axis=1))


def worst_bias(angles: np.ndarray, table: np.ndarray, action: np.ndarray, epsilon: float) -> float:
    """Largest |Q-style value - its value under the exact partition| when every return is its expectation.

    `table` [N, A] holds Q of each record's state. Exact: Q of the record's action minus its state's Q averaged over
    the actions that the cluster took.
    """
    n = len(angles)
    found = cluster(on_circle(angles), np.zeros(n, dtype=int), epsilon, centroid="seed")
    ret = table[np.arange(n), action]
    zeros = np.zeros(n, dtype=int)
    steps = StepBatch(zeros, np.arange(n), zeros, ret, ret, action, zeros, cluster=found.labels)
    value = advantages.estimate("bipace_q", steps, BipaceConfig(fallback="q"), diagnostics=False).step.numpy()
    taken = np.zeros((len(found.sizes), table.shape[1]))
    np.add.at(taken, (found.labels.numpy(), action), 1.0)
    share = (taken / taken.sum(axis=1, keepdims=True))[found.labels.numpy()]
    return float(np.abs(value - (ret - (share * table).sum(axis=1))).max())


def within(epsilon: float) -> float:
    """Largest cosine distance of two members of a cluster with seed centroids: twice the seed's angle apart."""
    e = epsilon + SLACK
    return 4 * e - 2 * e * e  # 1 - cos(2 arccos(1 - e))


@pytest.mark.parametrize("seed", range(3))
def test_bias_is_at_most_linear_in_epsilon_if_values_are_lipschitz_in_cosine_distance(seed):
    """|Q(s, a) - Q(s', a)| <= L (1 - cos): both means are off by L (4 eps - 2 eps^2) at most, so 8 L eps in all."""
    rng = np.random.default_rng(seed)
    places = np.sort(rng.choice(360, 24, replace=False)) * math.pi / 180
    values = rng.random((24, 3))
    distance = 1 - np.cos(places[:, None] - places)
    np.fill_diagonal(distance, np.inf)
    lipschitz = (np.abs(values[:, None] - values).max(axis=2) / distance).max()
    state, action = rng.integers(24, size=400), rng.integers(3, size=400)
    worst = []
    for epsilon in (1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.2):
        worst.append(worst_bias(places[state], values[state], action, epsilon))
        assert worst[-1] <= 2 * lipschitz * within(epsilon) + 1e-12
        if within(epsilon) < distance.min():
            assert worst[-1] < 1e-12  # no two states share a cluster
    assert worst[-1] > 0.1


def test_bias_grows_as_the_root_of_epsilon_if_values_are_lipschitz_in_the_angle():
    """Two members may be 2 arccos(1 - eps) apart, about 2 sqrt(2 eps): 4 L arccos(1 - eps) bounds the bias, and a
    smooth function on a continuum of states comes near it. No function there but a constant is Lipschitz in the
    cosine distance, which is the square of the angle."""
    rng = np.random.default_rng(0)
    angles, action = rng.uniform(0, math.pi, 8000), rng.integers(2, size=8000)
    table = np.stack([angles, -angles], axis=1)  # L = 1
    grid = [1e-3 * 4.0**k for k in range(4)]
    worst = [worst_bias(angles, table, action, epsilon) for epsilon in grid]
    for epsilon, bias in zip(grid, worst, strict=True):
        assert bias <= 4 * math.acos(1 - epsilon - SLACK)
        assert bias > 0.8 * math.acos(1 - epsilon)
    slope = np.polyfit(np.log(grid), np.log(worst), 1)[0]
    assert 0.4 < slope < 0.6  # linear would be 1


def test_running_mean_centroids_have_no_such_bound():
    """Crowds that arrive in order drag the mean along: members further apart than any two of a seed cluster."""
    alpha = math.radians(10)
    angles = np.repeat(np.radians([0, 9, 18, 27]), [1, 10, 100, 1000])
    epsilon, zeros = 1 - math.cos(alpha), np.zeros(1111, dtype=int)
    mean, seed = (cluster(on_circle(angles), zeros, epsilon, centroid=c) for c in ("mean", "seed"))
    assert len(mean.sizes) == 1 and 1 - math.cos(math.radians(27)) > within(epsilon)
    spread = [np.ptp(angles[seed.labels.numpy() == k]) for k in range(len(seed.sizes))]
    assert max(spread) <= 2 * alpha + 1e-9
