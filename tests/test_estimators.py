"""Estimators by hand arithmetic: the specification's vectors, its edge cases and the reported failures C3 to C16."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages import Branch, StepBatch, diagnostics, from_trajectories
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.records import EndReason, StepRecord, Trajectory

ALL = advantages.names()
MEAN = {"episode_mode": "mean"}


def batch(n: int, **columns) -> StepBatch:
    """`n` rows of one group: by default one turn of n trajectories, in one cluster, all the same."""
    values = {
        "group": ["g"] * n,
        "trajectory": list(range(n)),
        "turn": [0] * n,
        "ret": [0.0] * n,
        "score": [0.0] * n,
        "action_key": ["a"] * n,
        "observation_key": ["o"] * n,
        "observation_text": ["o"] * n,
        "cluster": [0] * n,
        "state_key": ["s"] * n,
    }
    return StepBatch(**(values | columns))


def step_of(name: str, keys: str, ret: list[float], **options) -> list[float]:
    """Step advantages of one part whose members took the actions `keys` and returned `ret`."""
    steps = batch(len(ret), action_key=list(keys), ret=ret)
    return advantages.estimate(name, steps, BipaceConfig(**options)).step.tolist()


def branches_of(name: str, keys: str, ret: list[float], **options) -> list[str]:
    steps = batch(len(ret), action_key=list(keys), ret=ret)
    return [Branch(b).name for b in advantages.estimate(name, steps, BipaceConfig(**options)).branch.tolist()]


def episode_of(scores: list[float], trajectory: list[int], **options) -> list[float]:
    """Episode advantages of one group's rows."""
    turn = [trajectory[:i].count(t) for i, t in enumerate(trajectory)]
    steps = batch(len(scores), score=scores, trajectory=trajectory, turn=turn)
    return advantages.estimate("grpo", steps, BipaceConfig(**options)).total.tolist()


def record(turn: int, reward: float = 0.0, **changes) -> StepRecord:
    fields = {
        "turn": turn,
        "observation": "hall",
        "prompt_ids": [1],
        "response_ids": [5, 6],
        "new_row": turn == 0,
        "text": "<action>go</action>",
        "action": "go",
        "valid": True,
        "reward": reward,
        "finish_reason": "stop",
    }
    return StepRecord(**(fields | changes))


def trajectory(sample: int, rewards: list[float], group: str = "g", **fields) -> Trajectory:
    steps = fields.pop("steps", [record(t, r) for t, r in enumerate(rewards)])
    return Trajectory(group=group, sample=sample, task={}, steps=steps, **fields)


# Action baselines ------------------------------------------------------------------------------------------------

KEYS, RETURNS = "xxyyz", [10.0, 0.0, 10.0, 10.0, 0.0]  # V = 6, Q(x) = 5, Q(y) = 10, Q(z) = 0


@pytest.mark.parametrize("name", ["bipace_q", "pace_q", "hidden_q", "one_q", "state_q", "ngram_q"])
def test_q_style(name):
    assert step_of(name, KEYS, RETURNS) == pytest.approx([-1, -1, 4, 4, -7.5])
    assert step_of(name, KEYS, RETURNS, fallback="q") == pytest.approx([-1, -1, 4, 4, -6])
    assert step_of(name, KEYS, RETURNS, fallback="zero") == pytest.approx([-1, -1, 4, 4, 0])
    assert branches_of(name, KEYS, RETURNS) == ["PACE"] * 4 + ["FALLBACK"]


def test_q_style_with_exclusive_peers():
    # Q without the step itself: x: 0 and 10, y: 10 and 10. V counts everybody, the lone z falls back.
    assert step_of("bipace_q", KEYS, RETURNS, peers="exclusive") == pytest.approx([-6, 4, 4, 4, -7.5])
    assert step_of("bipace_q", KEYS, RETURNS, peers="exclusive", fallback="q") == pytest.approx([-6, 4, 4, 4, -6])


def test_shrinkage():
    # n / (n + 1): 2/3 for x and y; leave-one-out is no Q - V and stays, the self-inclusive lone key is one: 1/2.
    assert step_of("bipace_q", KEYS, RETURNS, shrink=1.0) == pytest.approx([-2 / 3, -2 / 3, 8 / 3, 8 / 3, -7.5])
    assert step_of("bipace_q", KEYS, RETURNS, shrink=1.0, fallback="q")[4] == pytest.approx(-3)


@pytest.mark.parametrize("name", ["bipace_diff", "pace_diff", "one_diff"])
def test_diff_peer(name):
    # Means of the others: x against 10, 10, 0; y against 10, 0, 0; z against 10, 0, 10, 10.
    assert step_of(name, KEYS, RETURNS) == pytest.approx([10 / 3, -20 / 3, 20 / 3, 20 / 3, -7.5])
    assert branches_of(name, KEYS, RETURNS) == ["PACE"] * 5


@pytest.mark.parametrize("name", ["gigpo", "bigpo", "one_v", "state_v", "ngram_v"])
def test_state_baseline(name):
    assert step_of(name, KEYS, RETURNS) == pytest.approx([4, -6, 4, 4, -6])
    assert branches_of(name, KEYS, RETURNS) == ["NONE"] * 5


def test_every_key_alone_is_leave_one_out():
    assert step_of("bipace_q", "vwxyz", RETURNS) == pytest.approx([5, -7.5, 5, 5, -7.5])
    assert step_of("bipace_diff", "vwxyz", RETURNS) == pytest.approx([5, -7.5, 5, 5, -7.5])


def test_one_key_only():
    ret = [4.0, 1.0, 1.0]  # leave-one-out: 4 - 1, 1 - 2.5, 1 - 2.5
    assert step_of("bipace_q", "xxx", ret) == [0, 0, 0]
    assert branches_of("bipace_q", "xxx", ret) == ["PACE"] * 3
    assert step_of("bipace_q", "xxx", ret, peers="exclusive") == [0, 0, 0]
    assert step_of("bipace_q", "xxx", ret, single_key="rloo") == pytest.approx([3, -1.5, -1.5])
    assert branches_of("bipace_q", "xxx", ret, single_key="rloo") == ["FALLBACK"] * 3
    assert step_of("bipace_diff", "xxx", ret) == pytest.approx([3, -1.5, -1.5])
    assert branches_of("bipace_diff", "xxx", ret) == ["FALLBACK"] * 3


def test_step_std():
    # Unbiased std of 10, 0, 10, 10, 0: squares 16, 36, 16, 16, 36 sum to 120; 120 / 4 = 30.
    scale = math.sqrt(30) + 1e-6
    assert step_of("bigpo", KEYS, RETURNS, step_std=True) == pytest.approx([x / scale for x in (4, -6, 4, 4, -6)])
    assert step_of("bipace_q", KEYS, RETURNS, step_std=True) == pytest.approx(
        [x / scale for x in (-1, -1, 4, 4, -7.5)]
    )
    assert step_of("bigpo", "xx", [3.0, 3.0], step_std=True) == [0, 0]


@pytest.mark.parametrize("name", [n for n in ALL if n != "grpo"])
def test_a_singleton_gives_zero(name):
    options = {"step_std": True, "single_key": "rloo", "fallback": "q"}
    steps = batch(1, ret=[7.0])
    result = advantages.estimate(name, steps, BipaceConfig(**options))
    assert result.step.tolist() == [0] and result.branch.tolist() == [Branch.SINGLETON]


@pytest.mark.parametrize("name", ALL)
def test_no_rows(name):
    result = advantages.estimate(name, batch(0), BipaceConfig())
    assert result.total.shape == result.branch.shape == (0,)
    assert result.diagnostics["bipace/steps"] == 0


def test_the_total_is_the_weighted_sum():
    steps = batch(2, score=[1.0, 0.0], ret=[3.0, 0.0])
    result = advantages.estimate("bigpo", steps, BipaceConfig(w=0.5, **MEAN))
    assert result.episode.tolist() == [0.5, -0.5] and result.step.tolist() == [1.5, -1.5]
    assert result.total.tolist() == [1.25, -1.25]


def test_grpo_has_no_step_part():
    result = advantages.estimate("grpo", batch(2, score=[1.0, 0.0], ret=[3.0, 0.0]), BipaceConfig(**MEAN))
    assert result.step.tolist() == [0, 0] and result.total.tolist() == [0.5, -0.5]
    assert result.branch.tolist() == [Branch.NONE] * 2


# HGPO ------------------------------------------------------------------------------------------------------------


def test_hgpo_weighs_longer_matches_more():
    # Trajectories 0 and 1 see a, c; trajectory 2 sees b, c. Rows: turn 0 of each, then turn 1 of each.
    steps = batch(
        6,
        trajectory=[0, 1, 2, 0, 1, 2],
        turn=[0, 0, 0, 1, 1, 1],
        observation_key=list("aabccc"),
        ret=[2.0, 4.0, 9.0, 0.0, 3.0, 6.0],
    )
    result = advantages.estimate("hgpo", steps, BipaceConfig())
    # a: mean 3, only k = 1 has mates. c: k = 1 mean 3 (weight 2), k = 2, trajectories 0 and 1, mean 1.5 (weight 3).
    expected = [-1, 1, 0, (2 * -3 + 3 * -1.5) / 5, (2 * 0 + 3 * 1.5) / 5, 3]
    assert result.step.tolist() == pytest.approx(expected)
    assert result.branch.tolist() == [0, 0, Branch.SINGLETON, 0, 0, 0]
    squared = advantages.estimate("hgpo", steps, BipaceConfig(hgpo_alpha=2.0)).step[3]  # weights 4 and 9
    assert squared == pytest.approx((4 * -3 + 9 * -1.5) / 13)
    flat = advantages.estimate("hgpo", steps, BipaceConfig(hgpo_k=0)).step.tolist()
    assert flat == pytest.approx(advantages.estimate("gigpo", steps, BipaceConfig()).step.tolist())


def test_hgpo_uses_the_population_std():
    steps = batch(2, ret=[2.0, 4.0])
    result = advantages.estimate("hgpo", steps, BipaceConfig(step_std=True))
    assert result.step.tolist() == pytest.approx([-1 / (1 + 1e-6), 1 / (1 + 1e-6)])


def test_hgpo_counts_no_more_history_than_a_step_has_lived():
    # Both see c, but trajectory 0 at turn 0 and trajectory 1 at turn 1: they agree on one observation, not on two.
    steps = batch(3, trajectory=[0, 1, 1], turn=[0, 0, 1], observation_key=list("cbc"), ret=[2.0, 9.0, 4.0])
    assert advantages.estimate("hgpo", steps, BipaceConfig()).step.tolist() == pytest.approx([-1, 0, 1])


# Episode part ----------------------------------------------------------------------------------------------------


def test_episode_weighting():
    scores, rows = [1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1]
    each_trajectory = {"episode_weighting": "trajectory"}
    assert episode_of(scores, rows, **MEAN, **each_trajectory) == pytest.approx([0.5, 0.5, 0.5, -0.5])
    assert episode_of(scores, rows, **MEAN) == pytest.approx([0.25, 0.25, 0.25, -0.75])
    # Unbiased std: of (1, 0) by trajectory 0.7071, of (1, 1, 1, 0) by step 0.5.
    assert episode_of(scores, rows, **each_trajectory)[0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))
    assert episode_of(scores, rows)[3] == pytest.approx(-0.75 / (0.5 + 1e-6))


def test_a_group_that_never_differs_gets_exactly_zero():
    """[C3] Groups of 4, 3 and 4; nobody's baseline is the batch's."""
    scores = [1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 0.0, 0.0, 0.0, 8.0]
    group = ["a"] * 4 + ["b"] * 3 + ["c"] * 4
    steps = batch(11, group=group, score=scores, ret=scores)
    for name in ("grpo", "gigpo", "bipace_q", "hgpo"):
        for mode in ("mean", "mean_std"):
            total = advantages.estimate(name, steps, BipaceConfig(episode_mode=mode, step_std=True)).total
            assert total[4:7].tolist() == [0, 0, 0]
    assert episode_rows(steps)[:4] == [0.5, -0.5, -0.5, 0.5] and episode_rows(steps)[7:] == [-2, -2, -2, 6]


def episode_rows(steps: StepBatch) -> list[float]:
    return advantages.estimate("grpo", steps, BipaceConfig(**MEAN)).episode.tolist()


def test_a_long_trajectory_weighs_as_documented():
    """[C4] One trajectory of 40 turns that scores 1, seven of 4 turns that score 0."""
    rows = [0] * 40 + [t for t in range(1, 8) for _ in range(4)]
    scores = [1.0] * 40 + [0.0] * 28
    assert episode_of(scores, rows, episode_weighting="trajectory", **MEAN)[0] == pytest.approx(1 - 1 / 8)
    assert episode_of(scores, rows, episode_weighting="step", **MEAN)[0] == pytest.approx(1 - 40 / 68)


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("grpo",)])
def test_parts_stay_inside_a_group(name):
    """[C5] Everything equal but the group: two parts, each with its own baseline."""
    steps = batch(4, group=["a", "b", "a", "b"], ret=[0.0, 10.0, 2.0, 14.0], action_key=list("xxyy"))
    step = advantages.estimate(name, steps, BipaceConfig(step_std=False)).step
    scale = 1 if name.endswith("_v") or name in ("gigpo", "bigpo", "hgpo") else 2
    k = 2 if name.endswith("_nested") or name == "bipace_hgpo" else 5 if name.endswith("_eb") else None
    if k:
        scale = 1 - (k / (1 + k)) ** 2  # of the deviation 1, at the action and then at its history
    assert step.tolist() == pytest.approx([-scale, -2 * scale, scale, 2 * scale])


def test_groups_are_found_by_id_not_by_position():
    """[C6] Two prompts x 2 samples, interleaved."""
    steps = batch(4, group=[7, 3, 7, 3], trajectory=[0, 0, 1, 1], score=[1.0, 10.0, 0.0, 20.0])
    assert episode_rows(steps) == [0.5, -5, -0.5, 5]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mode", ["mean", "mean_std"])
def test_a_group_of_one_trajectory(name, mode):
    """[C7] No baseline, so no episode advantage; counted, warned about, never NaN."""
    steps = batch(
        3, group=["a", "a", "b"], trajectory=[0, 0, 0], turn=[0, 1, 0], score=[1.0, 0.9, 1.0], ret=[1.0, 0.9, 1.0]
    )
    for weighting in ("trajectory", "step"):
        config = BipaceConfig(episode_mode=mode, episode_weighting=weighting)
        result = advantages.estimate(name, steps, config)
        assert result.episode.tolist() == [0, 0, 0]
        assert torch.isfinite(result.total).all()
        assert result.diagnostics["bipace/groups_of_one"] == 2
        assert any("2 group(s) have one trajectory left" in text for text in diagnostics.warnings(result.diagnostics))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 0.35, -3.7, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(name, value):
    """[C8] In every mode, and the iteration says how many groups carry no signal."""
    rows = {"group": list("aaabbb"), "ret": [value] * 6, "score": [value] * 6, "action_key": list("xxyxyz")}
    for mode in ("mean", "mean_std"):
        for options in ({"step_std": True}, {"fallback": "q", "peers": "exclusive"}, {"single_key": "rloo"}):
            result = advantages.estimate(name, batch(6, **rows), BipaceConfig(episode_mode=mode, **options))
            assert result.total.tolist() == [0] * 6
            assert result.diagnostics["bipace/groups_without_signal"] == 2
            assert any("no group carries a signal" in text for text in diagnostics.warnings(result.diagnostics))


def test_no_residue_is_divided_by_a_tiny_std():
    scores = [0.35] * 7 + [0.35 + 1e-9]  # equal within 1e-8
    assert episode_of(scores, list(range(8))) == [0] * 8
    for last in (0.35 + 1e-7, 0.36, 1.0):
        values = episode_of([0.35] * 7 + [last], list(range(8)))
        assert max(map(abs, values)) < 7 / math.sqrt(8)  # what eight values can reach at most
        steps = step_of("bigpo", "xxxxxxxx", [0.35] * 7 + [last], step_std=True)
        assert max(map(abs, steps)) < 7 / math.sqrt(8)


# From records ----------------------------------------------------------------------------------------------------


def test_every_reward_stays_on_its_own_turn():
    """[C16] Rewards -0.2 then 1.0."""
    steps = from_trajectories([trajectory(0, [-0.2, 1.0]), trajectory(1, [0.0, 0.0])], BipaceConfig())
    assert steps.ret.tolist() == pytest.approx([-0.2 + 0.95, 1.0, 0, 0])
    assert steps.score.tolist() == pytest.approx([0.8, 0.8, 0, 0])


def test_the_invalid_penalty_does_not_flow_back():
    bad = record(1, 0.0, valid=False, action="", text="?")
    steps = from_trajectories(
        [trajectory(0, [], steps=[record(0, 0.0), bad, record(2, 1.0)])], BipaceConfig(gamma=0.5)
    )
    assert steps.ret.tolist() == pytest.approx([0.25, 0.5 - 0.1, 1.0])
    assert steps.score.tolist() == pytest.approx([1.0, 1.0 - 0.1, 1.0])
    assert steps.valid.tolist() == [True, False, True]
    assert steps.action_key[0] == steps.action_key[2] != steps.action_key[1]


def test_a_refused_command_is_an_action_like_any_other():
    refused = [record(t, accepted=False, action="fly", response_ids=[t]) for t in range(2)]
    steps = from_trajectories([trajectory(0, [], steps=refused)], BipaceConfig())
    assert steps.ret.tolist() == [0.0, 0.0]
    assert steps.action_key[0] == steps.action_key[1]
    assert steps.valid.tolist() == [True, True]


def test_two_failures_to_parse_are_two_actions():
    unparsed = [record(t, valid=False, action="", response_ids=[t]) for t in range(2)]
    steps = from_trajectories([trajectory(0, [], steps=unparsed)], BipaceConfig())
    assert steps.action_key[0] != steps.action_key[1]


def test_a_trajectory_without_a_token_is_left_out():
    """[C9] And so is one whose environment failed; both are counted."""
    rollouts = [
        trajectory(0, [1.0]),
        trajectory(1, [], end=EndReason.CONTEXT_FULL),
        trajectory(2, [], steps=[record(0, response_ids=[])], end=EndReason.CONTEXT_FULL),
        trajectory(3, [5.0], end=EndReason.ENV_ERROR),
        trajectory(4, [0.0]),
    ]
    steps = from_trajectories(rollouts, BipaceConfig())
    assert steps.source_trajectory.tolist() == [0, 4] and steps.source_step.tolist() == [0, 0]
    result = advantages.estimate("gigpo", steps, BipaceConfig(**MEAN))
    assert result.episode.tolist() == [0.5, -0.5]
    assert result.diagnostics["bipace/trajectories_empty"] == 2
    assert result.diagnostics["bipace/trajectories_failed"] == 1
    assert len(from_trajectories(rollouts[1:4], BipaceConfig())) == 0


def test_records_that_cannot_be_right():
    with pytest.raises(ValueError, match="two trajectories are sample 0 of group 'g'"):
        from_trajectories([trajectory(0, [1.0]), trajectory(0, [0.0])], BipaceConfig())
    with pytest.raises(ValueError, match="reward: got nan at group g, trajectory 3, turn 1"):
        from_trajectories([trajectory(3, [1.0, math.nan])], BipaceConfig())
    with pytest.raises(ValueError, match="two rows are group g, trajectory 0, turn 0"):
        from_trajectories([trajectory(0, [], steps=[record(0), record(0)])], BipaceConfig())
    from_trajectories([trajectory(0, [1.0]), trajectory(0, [0.0], group="h")], BipaceConfig())


# Batches and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("ret", [0.0, math.nan], "ret: got nan at row 1, expected finite numbers"),
        ("score", [math.inf, 0.0], "score: got inf at row 0"),
        ("ret", [0.0, 1e31], r"ret: got 1e\+31 at row 1"),
        ("ret", [0.0], r"ret: got shape \(1,\), expected \(2,\)"),
        ("ret", ["a", "b"], "ret: got a list that is no array of numbers"),
        ("turn", [0.5, 1.0], "turn: got torch.float32, expected integers"),
        ("cluster", [0, -1], "cluster: got -1, expected integers >= 0"),
        ("action_key", ["a", 1], "action_key: got keys of several types"),
        ("action_key", [1, "a"], "action_key: got a list that is no array of numbers"),
        ("observation_text", ["a"], "observation_text: got shape"),
        ("trajectory", [0, 0], "two rows are group g, trajectory 0, turn 0"),
    ],
)
def test_a_bad_batch_names_its_field(column, values, message):
    with pytest.raises(ValueError, match=message):
        batch(2, **{column: values})


def test_the_kind_of_array_does_not_matter():
    """Python lists are read in double precision too, and huge integers are fine as keys."""
    ret, big = [0.1, 0.7, 0.3], [2**62, 5, 2**62]
    plain = batch(3, ret=ret, action_key=list("xyx"), state_key=["p", "q", "p"])
    others = [
        batch(
            3, ret=torch.tensor(ret, dtype=torch.float64), action_key=torch.tensor(big), state_key=torch.tensor(big)
        ),
        batch(3, ret=np.array(ret), action_key=np.array(["x", "y", "x"]), state_key=np.array(big)),
    ]
    assert plain.ret.tolist() == ret
    for name in ("state_q", "bipace_q", "hgpo"):
        expected = advantages.estimate(name, plain, BipaceConfig()).total
        for other in others:
            assert torch.equal(advantages.estimate(name, other, BipaceConfig()).total, expected)


def test_missing_columns_are_named():
    for name, column in (("bigpo", "cluster"), ("ngram_v", "observation_text"), ("state_q", "state_key")):
        with pytest.raises(ValueError, match=f"StepBatch.{column} is"):
            advantages.estimate(name, batch(2, **{column: None}), BipaceConfig())
    with pytest.raises(ValueError, match="StepBatch.state_key is unknown for some rows"):
        advantages.estimate("state_v", batch(2, state_key=["s", None]), BipaceConfig())
    steps = batch(2)
    steps.cluster = torch.tensor([0])
    with pytest.raises(ValueError, match="StepBatch.cluster: got 1 labels, expected 2"):
        advantages.estimate("bigpo", steps, BipaceConfig())


def test_names():
    assert {"grpo", "hgpo", "gigpo", "bigpo", "bipace_q", "bipace_diff", "pace_q", "pace_diff"} <= set(ALL)
    assert all(
        f"{p}_{b}" in ALL for p in ("one", "ngram", "state", "hidden", "observation") for b in advantages.BASELINES
    )
    assert len(set(ALL)) == len(ALL) and all(map(advantages.is_ours, ALL))
    assert not advantages.is_ours("reinforce_baseline")
    assert [n for n in ALL if advantages.needs_hidden(n)] == [
        "bigpo", "bipace_q", "bipace_diff", "bipace_eb", "bipace_hgpo",
        "hidden_v", "hidden_q", "hidden_diff", "hidden_eb", "hidden_nested",
    ]  # fmt: skip
    for call in (advantages.needs_hidden, advantages.state_only, lambda n: advantages.check(n, BipaceConfig())):
        with pytest.raises(ValueError, match=r"advantage estimator: got 'bipace', allowed: grpo \| hgpo \| gigpo"):
            call("bipace")


def test_aliases_are_the_pairings():
    steps = batch(5, action_key=list(KEYS), ret=RETURNS)
    for alias, name in advantages.ALIASES.items():
        a, b = (advantages.estimate(n, steps, BipaceConfig()) for n in (alias, name))
        assert torch.equal(a.total, b.total) and a.diagnostics == b.diagnostics


def test_state_only():
    pairs = {"bipace_q": "bigpo", "bipace_diff": "bigpo", "pace_q": "gigpo", "one_q": "one_v", "hidden_v": "bigpo"}
    assert {name: advantages.state_only(name) for name in pairs} == pairs
    for name in ("grpo", "hgpo", "bipace_eb", "bipace_hgpo", "one_nested"):
        assert advantages.state_only(name) == name


def test_refused_at_start_up():
    advantages.check("bipace_q", BipaceConfig(epsilon="auto"))
    with pytest.raises(ValueError, match="--bipace.epsilon: got 'auto', allowed with ngram_q: a number"):
        advantages.check("ngram_q", BipaceConfig(epsilon="auto"))
    for alpha in (math.nan, 1e4):
        with pytest.raises(ValueError, match="--bipace.hgpo_alpha: got"):
            advantages.check("hgpo", BipaceConfig(hgpo_alpha=alpha))


def test_clustering_order():
    steps = batch(4, group=list("baba"), trajectory=[1, 0, 0, 1], turn=[0, 1, 1, 0])
    assert steps.order("turn").tolist() == [0, 2, 3, 1]  # group b, then a, in the order in which they came
    assert steps.order("trajectory").tolist() == [2, 0, 1, 3]
    with pytest.raises(ValueError, match="order: got 'row', allowed: turn"):
        steps.order("row")


@pytest.mark.parametrize("name", ["shrink", "invalid_penalty", "hgpo_alpha", "min_r2", "w", "gamma", "epsilon"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_options_must_be_finite(name, value):
    with pytest.raises(ValueError, match=f"--bipace.{name}: got {value}, allowed: "):
        BipaceConfig(**{name: value})
