"""`bipace_hgpo` and `bipace_eb`: hand arithmetic, limits, and the measured noise ratio on known variances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages import Branch, StepBatch
from openrlhf_bipace.advantages.hierarchy import MOST, noise_ratio, squares
from openrlhf_bipace.advantages.pipeline import CreditPipeline
from openrlhf_bipace.clustering import cluster
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.records import StepRecord, Trajectory

BOTH = ("bipace_hgpo", "bipace_eb")


def batch(ret, cluster, keys, trajectory=None, turn=None, group=None) -> StepBatch:
    """One group whose rows are turn 0 of as many trajectories, unless said otherwise."""
    n = len(ret)
    return StepBatch(
        group=group or ["g"] * n,
        trajectory=trajectory or list(range(n)),
        turn=turn or [0] * n,
        ret=ret,
        score=[0.0] * n,
        action_key=list(keys),
        observation_key=["o"] * n,
        cluster=cluster,
    )


def step_of(name: str, steps: StepBatch, **options) -> list[float]:
    return advantages.estimate(name, steps, BipaceConfig(**options)).step.tolist()


def ratio(ret, upper, lower, trajectory) -> float:
    x, row = torch.tensor(ret, dtype=torch.float64), torch.tensor(trajectory)
    return noise_ratio(*(squares(x, row, (torch.tensor(label), max(label) + 1)) for label in (upper, lower)), 1e-9)


# The walk down the levels ----------------------------------------------------------------------------------------


def test_the_worked_example():
    """(x,10) (x,0) (y,10) (y,10) (z,0) in one part that is the whole group: V = 6 whatever k."""
    steps = batch([10.0, 0.0, 10.0, 10.0, 0.0], [0] * 5, "xxyyz")
    # Of two members half the deviation at the action and half of the rest at the (same) history: 3/4; of one 5/9.
    assert step_of("bipace_hgpo", steps) == pytest.approx([-0.75, -0.75, 3, 3, -6 * 5 / 9])


def test_four_levels():
    """Trajectories 0, 1: a then c; trajectory 2: b then c. First turns in cluster 0, second ones in cluster 1."""
    steps = batch(
        [8.0, 4.0, 0.0, 8.0, 4.0, 0.0],
        [0, 0, 0, 1, 1, 1],
        "aabccc",
        trajectory=[0, 1, 2, 0, 1, 2],
        turn=[0, 0, 0, 1, 1, 1],
    )
    # Group, both clusters and the action c have mean 4, so V = 4 and only what is below differs from it.
    a = 1 + 0.5 * 1  # two of three: from 4 half way to 6, then from 5 half way to 6
    b = -4 / 3 - 4 * 2 / 3 / 3
    after_a, after_b = 0.5 * 2, -4 / 3  # c after a has mean 6, c after b has 0
    assert step_of("bipace_hgpo", steps) == pytest.approx([a, a, b, after_a, after_a, after_b])


def test_a_part_of_one_is_compared_with_its_group():
    steps = batch([9.0, 0.0, 0.0], [0, 1, 1], "xyy")
    # Group mean 3. Cluster 0: V = 3 + (9 - 3) / 3 = 5, action 5 + 4 / 3, history 2/3 of what is left nearer.
    # Cluster 1: V = 3 - 3 / 2 = 1.5, then 0.75, then 0.375.
    result = advantages.estimate("bipace_hgpo", steps, BipaceConfig())
    assert result.step.tolist() == pytest.approx([4 * 5 / 9, -1.125, -1.125])
    assert [Branch(b).name for b in result.branch.tolist()] == ["SINGLETON", "PACE", "PACE"]


def test_branches():
    steps = batch([1.0, 2.0, 3.0, 4.0], [0, 0, 0, 1], "xxyx")
    for name in BOTH:
        branch = advantages.estimate(name, steps, BipaceConfig()).branch.tolist()
        assert branch == [Branch.PACE, Branch.PACE, Branch.FALLBACK, Branch.SINGLETON]


def test_many_returns_give_the_papers_values():
    """With n -> infinity every shrinkage goes: Q - V of the cluster."""
    n = 4000
    ret = [10.0, 0.0, 4.0, 0.0] * n
    steps = batch(ret, [0, 0, 1, 1] * n, "xyxy" * n)
    torch.testing.assert_close(
        torch.tensor(step_of("bipace_hgpo", steps)), torch.tensor(step_of("bipace_q", steps)), rtol=2e-3, atol=0
    )


@pytest.mark.parametrize("name", BOTH)
def test_flat_returns_give_exactly_zero(name):
    assert step_of(name, batch([0.1] * 4, [0, 0, 1, 2], "xyxz")) == [0, 0, 0, 0]
    moved = batch([0.1, 0.1, 0.1, 5.0, 1.0], [0, 0, 1, 2, 2], "xyxxy", group=list("aaabb"))
    assert step_of(name, moved)[:3] == [0, 0, 0] and step_of(name, moved)[3] > 0


@pytest.mark.parametrize("name", BOTH)
def test_with_one_part_per_step_only_the_group_speaks(name):
    """epsilon too small, and every action new: what is left is a share of R minus the group's mean."""
    ret = [4.0, 1.0, -2.0, 1.0]
    step = torch.tensor(step_of(name, batch(ret, [0, 1, 2, 3], "wxyz")))
    deviation = torch.tensor(ret) - 1
    share = step[0] / deviation[0]
    assert 0 < share < 1
    torch.testing.assert_close(step, share * deviation)


@pytest.mark.parametrize("name", BOTH)
def test_step_std_is_that_of_the_group(name):
    steps = batch([4.0, 0.0, 0.0], [0, 1, 1], "xyz")
    spread = float(np.std([4.0, 0.0, 0.0], ddof=1)) + 1e-6
    plain = step_of(name, steps)
    assert step_of(name, steps, step_std=True) == pytest.approx([x / spread for x in plain])


@pytest.mark.parametrize("name", BOTH)
def test_parts_may_cross_groups_with_scope_batch(name):
    columns = {"ret": [4.0, 0.0, 8.0, 0.0], "cluster": [0, 1, 0, 1], "keys": "xyxy"}
    apart = batch(**columns, group=list("aabb"), trajectory=[0, 1, 0, 1])
    whole = batch(**columns)
    assert step_of(name, apart, scope="batch") == pytest.approx(step_of(name, whole))
    assert step_of(name, apart) != pytest.approx(step_of(name, whole))


# The measured ratio ----------------------------------------------------------------------------------------------


def test_the_ratio_by_hand():
    """One upper part, lower parts {0, 2} and {6, 8}, all of different trajectories."""
    # Inside: 4 for every pair. Across: 36, 64, 16, 36, mean 38. k = 4 / (38 - 4).
    assert ratio([0, 2, 6, 8], [0] * 4, [0, 0, 1, 1], [0, 1, 2, 3]) == pytest.approx(4 / 34)


def test_pairs_of_one_trajectory_do_not_count():
    # Rows 0 and 1 are of one trajectory: row 0 has partners inside (2) and across (3), and so has every other row.
    # Inside: (0,2) and (1,2), 4 each way: 4 + 4 + 4 + 4 over 4. Row 3 has nobody inside, so it starts no pair;
    # across: rows 0, 1, 2 to row 3: 36, 36, 16.
    assert ratio([0, 0, 2, 6], [0] * 4, [0, 0, 0, 1], [0, 0, 1, 2]) == pytest.approx(4 / (88 / 3 - 4))


def test_the_ratio_is_bounded():
    assert ratio([0, 6, 0, 6], [0] * 4, [0, 0, 1, 1], [0, 1, 2, 3]) == MOST  # the parts differ in nothing
    assert ratio([3, 3, 5, 5], [0] * 4, [0, 0, 1, 1], [0, 1, 2, 3]) == 0  # nor do the returns inside one
    assert ratio([1, 2, 3, 4], [0] * 4, [0, 1, 2, 3], [0, 1, 2, 3]) == MOST  # no pair inside
    assert ratio([1, 2, 3, 4], [0] * 4, [0] * 4, [0, 1, 2, 3]) == MOST  # no pair across
    assert ratio([0, 0, 0, 0], [0] * 4, [0, 0, 1, 1], [0, 1, 2, 3]) == MOST  # nothing differs


@pytest.mark.parametrize(("noise", "between"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6)])
def test_the_ratio_finds_known_variances(noise, between):
    """400 groups of 6 parts of 8 trajectories, each with two rows of the same luck, which must not count as a pair."""
    rng = np.random.default_rng(0)
    groups, lower, members = 400, 6, 8
    part = np.repeat(np.arange(groups * lower), members)
    trajectory = np.arange(groups * lower * members)
    ret = between * rng.standard_normal(groups * lower)[part] + noise * rng.standard_normal(len(part))
    twice = [np.concatenate([x, x]) for x in (ret, part, part // lower, trajectory)]  # each row again, the same luck
    ret, part, group, trajectory = twice
    found = ratio(ret.tolist(), group.tolist(), part.tolist(), trajectory.tolist())
    assert found == pytest.approx(noise**2 / between**2, rel=0.1)


def test_without_noise_eb_is_the_cluster_s_own_q():
    """Returns that depend on the cluster and the action alone: k = 0 below the cluster, so Q is the action's mean."""
    keys, cluster = "xyxyxyxy", [0, 0, 0, 0, 1, 1, 1, 1]
    steps = batch([6.0, 0.0, 6.0, 0.0, 2.0, 0.0, 2.0, 0.0], cluster, keys)
    v = ratio(steps.ret.tolist(), [0] * 8, cluster, list(range(8)))
    q = torch.tensor([6.0, 0, 6, 0, 2, 0, 2, 0], dtype=torch.float64)
    mean = torch.tensor([3.0] * 4 + [1.0] * 4, dtype=torch.float64)
    expected = q - (2 + 4 / (4 + v) * (mean - 2))
    torch.testing.assert_close(torch.tensor(step_of("bipace_eb", steps), dtype=torch.float64), expected)


def test_the_measured_constants_are_logged():
    steps = batch([0.0, 2.0, 6.0, 8.0], [0, 0, 1, 1], "xxxx")
    logged = advantages.estimate("bipace_eb", steps, BipaceConfig()).diagnostics
    assert logged["bipace/k_part"] == pytest.approx(4 / 34)
    assert logged["bipace/k_action"] == logged["bipace/k_history"] == MOST  # one action, so nothing tells
    assert "bipace/k_part" not in advantages.estimate("bipace_hgpo", steps, BipaceConfig()).diagnostics


def test_an_action_that_tells_nothing_is_shrunk_more():
    """x and y returned the same mean, with noise: k rises to its bound, and Q - V stays nearer to 0."""
    ret = [9.0, 0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 8.0]
    steps = batch(ret, [0] * 9, "xxxxyyyyz")
    eb = step_of("bipace_eb", steps)
    share = 4 / 9 + 5 / 9 * 4 / 9  # k = 5, four members, at the action and at the history that adds nothing to it
    assert eb[:4] == pytest.approx([share * (9 / 4 - 26 / 9)] * 4)
    assert eb[8] == pytest.approx((1 / 6 + 5 / 6 * 1 / 6) * (8 - 26 / 9))


# Through the pipeline --------------------------------------------------------------------------------------------


class Elsewhere:
    """Vectors that stay where they are: only labels come back."""

    def __init__(self, phi: torch.Tensor) -> None:
        self.phi = phi

    def __len__(self) -> int:
        return len(self.phi)

    def cluster(self, group_ids, epsilon, **options):
        return cluster(self.phi, group_ids, epsilon, **options)


def rollouts() -> tuple[list[Trajectory], torch.Tensor]:
    """Eight rollouts whose hidden states tell the room; the room decides the return, the action a part of it."""
    gen, out, phi = torch.Generator().manual_seed(1), [], []
    for sample in range(8):
        steps = []
        for turn in range(3):
            action = "left" if (sample + turn) % 2 else "right"
            reward = 10.0 * turn + 2.0 * (action == "left")
            steps.append(StepRecord(turn, f"room {turn}", [1], [2], turn == 0, "", action, True, reward, "stop"))
            phi.append(torch.eye(8)[turn] + 0.05 * torch.randn(8, generator=gen))
        out.append(Trajectory("g", sample, {}, steps))
    return out, torch.stack(phi)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("epsilon", [0.1, "auto"])
def test_the_pipeline_needs_labels_alone(name, epsilon):
    trajectories, phi = rollouts()
    config = BipaceConfig(epsilon=epsilon, gamma=0.0)
    near, far = (CreditPipeline(name, config).run(trajectories, given) for given in (phi, Elsewhere(phi)))
    assert torch.equal(near.values, far.values) and near.warnings == []
    step = {source: columns["advantage_step"] for source, columns in near.columns.items()}
    for turn in range(3):
        left, right = ([v for (i, t), v in step.items() if t == turn and (i + t) % 2 == odd] for odd in (1, 0))
        assert min(left) > max(right) + 0.5


@pytest.mark.parametrize(("name", "used"), [("bipace_hgpo", "bipace_hgpo"), ("bipace_q", "bigpo")])
def test_a_refused_calibration_replaces_only_what_it_would_harm(name, used):
    trajectories, phi = rollouts()
    credit = CreditPipeline(name, BipaceConfig(epsilon="auto", gamma=0.0, min_r2=0.999)).run(trajectories, phi)
    steps = advantages.from_trajectories(trajectories, BipaceConfig(gamma=0.0))
    steps.cluster = credit.calibration.clusters.labels
    expected = advantages.estimate(used, steps, BipaceConfig(gamma=0.0)).total
    assert torch.equal(credit.values, expected)
    assert any(text.endswith(f"carry no state; this iteration uses {used}") for text in credit.warnings)
