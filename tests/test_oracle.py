"""The oracle lab against hand arithmetic, naive loops, finite differences and the trainer's own pipeline."""

from __future__ import annotations

import csv
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from openrlhf_bipace.advantages.pipeline import CreditPipeline
from openrlhf_bipace.cli import study as cli
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.envs.rooms_solver import RoomsModel
from openrlhf_bipace.lab.oracle import arms, figures, measures, model_world, plan, study, tables
from openrlhf_bipace.lab.oracle.geometry import GEOMETRIES
from openrlhf_bipace.lab.oracle.gradient import Compass, Directions, exact_gradient, heads
from openrlhf_bipace.lab.oracle.measures import Measure
from openrlhf_bipace.lab.oracle.sample import Rows, Sampler
from openrlhf_bipace.lab.oracle.size import QUICK
from openrlhf_bipace.lab.oracle.world import ACTION, FREE, PLAN, World, tabular
from openrlhf_bipace.lab.provenance import commit

HORIZON = 9


@pytest.fixture(scope="module")
def small() -> World:
    """Two tasks of which one is easy."""
    labels = plan.tasks(6, wordings=2)[4:]
    return tabular(labels, GEOMETRIES["healthy"], gamma=0.9, horizon=HORIZON, seed=0)


@pytest.fixture(scope="module")
def samples(small):
    sampler = Sampler(small, groups=4, seed=5)
    return [sampler.draw(number) for number in range(6)]


def joined(samples) -> tuple[Rows, np.ndarray]:
    """The rows of all samples, and the sample of each."""
    columns = [np.concatenate([getattr(s.rows, name) for s in samples]) for name in Rows.__slots__]
    return Rows(*columns), np.repeat(np.arange(len(samples)), [len(s.rows.task) for s in samples])


# The truth -------------------------------------------------------------------------------------------------------


def test_occupancy_and_values_agree_on_the_expected_return(small):
    """Forwards: visits times rewards. Backwards: the value of the start."""
    for model, policy, truth in zip(small.models, small.policies, small.truths, strict=True):
        reward = (policy.probs * model.reward).sum(axis=1)
        assert (truth.occupancy * reward).sum() == pytest.approx(truth.undiscounted.v[0, 0])
        still_open = truth.occupancy.sum(axis=1)
        assert still_open[0] == 1 and np.all(np.diff(still_open) <= 1e-12)
    assert small.success() == pytest.approx(np.mean([t.undiscounted.v[0, 0] for t in small.truths]))


@pytest.mark.parametrize("kind", [ACTION, FREE, PLAN])
def test_the_exact_gradient_is_the_derivative_of_the_exact_return(small, kind):
    """Central differences of the dynamic programme's return along random directions of the logits."""
    reasoning = small.reasoning[kind]
    tables_ = [small.probs]
    if reasoning.plan is not None:
        joint = (small.probs[..., None] * reasoning.plan).transpose(0, 2, 1)  # [C, K, A]
        tables_ = [joint.sum(axis=2), joint / joint.sum(axis=2, keepdims=True)]
    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = [rng.standard_normal(table.shape) for table in tables_]
        up, down = (expected_return(small, tables_, direction, h) for h in (1e-5, -1e-5))
        along = sum(g @ d.ravel() for g, d in zip(exact_gradient(small, reasoning), direction, strict=True))
        assert along == pytest.approx((up - down) / 2e-5, rel=1e-6)
        assert abs(along) > 1e-3


def expected_return(world: World, tables_: list[np.ndarray], direction: list[np.ndarray], h: float) -> float:
    """Summed over the tasks, after moving the logits of every table by h x direction."""
    moved = [p * np.exp(h * d) for p, d in zip(tables_, direction, strict=True)]
    moved = [p / p.sum(axis=-1, keepdims=True) for p in moved]
    probs = moved[0] if len(moved) == 1 else np.einsum("ck,cka->ca", *moved)
    total = 0.0
    for task, model in enumerate(world.models):
        own = probs[world.first[task] : world.first[task + 1], : len(model.actions)]
        total += model.policy_values(own, 1.0, world.horizon).v[0, 0]
    return total


def test_the_gradient_of_a_sample_is_the_sum_of_its_scores(small, samples):
    """Against a loop over turns and heads."""
    rows, batch = joined(samples)
    values = np.random.default_rng(1).standard_normal(len(batch))
    for kind, reasoning in small.reasoning.items():
        found = heads(small, reasoning, rows.context, rows.action, rows.free, rows.plan)
        assert len(found) == {ACTION: 1, FREE: 4, PLAN: 5}[kind]
        dense = [np.zeros((len(samples), *head.probs.shape)) for head in found]
        for i, r in enumerate(batch):
            for head, total in zip(found, dense, strict=True):
                c = head.context[i]
                total[r, c] += values[i] * (np.eye(head.probs.shape[1])[head.choice[i]] - head.probs[c])
        tokens = np.array([len(found) * (batch == r).sum() for r in range(len(samples))])
        flat = np.concatenate([d.reshape(len(samples), -1) for d in dense], axis=1) / tokens[:, None]
        exact = exact_gradient(small, reasoning)
        blind = np.zeros(flat.shape[1] - sum(map(len, exact)))
        truth = np.concatenate([blind, *exact])
        got = Compass(small, reasoning, rows, batch).directions(values)
        np.testing.assert_allclose(got.gram, flat @ flat.T, atol=1e-12)
        np.testing.assert_allclose(got.along, flat @ truth, atol=1e-12)
        assert got.exact == pytest.approx(np.linalg.norm(truth))


def test_reasoning_leaves_the_policy_as_it_is(small):
    """The plan token is drawn given the action, so summing it out gives the action's probability back."""
    rows = np.arange(len(small.probs))
    zeros = np.zeros(len(rows), dtype=int)
    announced, given = heads(small, replace(small.reasoning[PLAN], free=None), rows, zeros, zeros[:, None], zeros)
    given = given.probs.reshape(len(rows), -1, small.probs.shape[1])
    np.testing.assert_allclose(np.einsum("ck,cka->ca", announced.probs, given), small.probs)


# Samples ---------------------------------------------------------------------------------------------------------


def test_rollouts_follow_the_model_and_the_true_values(small, samples):
    for sample in samples:
        rows = sample.rows
        steps = [step for t in sample.trajectories for step in t.steps]
        ends = np.cumsum([len(t.steps) for t in sample.trajectories])
        a, v, undiscounted = arms.exact(small, sample)
        for i, step in enumerate(steps):
            model: RoomsModel = small.models[rows.task[i]]
            assert step.accepted and step.executed == model.actions[rows.action[i]]
            assert step.state_id == model.states[rows.state[i]].id
            assert step.reward == model.reward[rows.state[i], rows.action[i]]
            if i + 1 not in ends:
                assert rows.state[i + 1] == model.next_state[rows.state[i], rows.action[i]]
            truth = small.truths[rows.task[i]]
            where = rows.turn[i], rows.state[i]
            assert v[i] == truth.discounted.v[where]
            assert a[i] == truth.discounted.q[(*where, rows.action[i])] - v[i]
            assert undiscounted[i] == truth.undiscounted.advantage[(*where, rows.action[i])]


def test_actions_do_not_depend_on_group_size_or_wordings(small):
    labels = [{**task, "wordings": 8} for task in small.tasks]
    wordy = tabular(labels, GEOMETRIES["healthy"], gamma=0.9, horizon=HORIZON, seed=0)
    few, many = Sampler(small, groups=2, seed=5).draw(3), Sampler(wordy, groups=4, seed=5).draw(3)
    by_key = {(t.group, t.sample): [s.action for s in t.steps] for t in many.trajectories}
    assert all(by_key[t.group, t.sample] == [s.action for s in t.steps] for t in few.trajectories)
    texts = [{s.observation for t in x.trajectories for s in t.steps} for x in (few, many)]
    assert not texts[1] <= texts[0]


def test_sampled_success_is_the_exact_success(small):
    """4,000 episodes: within four standard errors."""
    sampler = Sampler(small, groups=200, seed=9)
    success = [t.success for number in range(10) for t in sampler.draw(number).trajectories]
    assert np.mean(success) == pytest.approx(small.success(), abs=4 * math.sqrt(0.25 / len(success)))


def test_geometry_separates_states_unless_it_collapsed():
    texts = ["one wording", "another wording"]
    for name, separated in (("healthy", True), ("collapsed", False)):
        g = GEOMETRIES[name]
        phi = np.stack(
            [g.vector(s, t) for s in ("hall|shut|plain", "study|shut|plain", "study|held|hot") for t in texts]
        )
        phi /= np.linalg.norm(phi, axis=1, keepdims=True)
        distance = 1 - phi @ phi.T
        same, near, far = distance[0, 1], distance[0, 2], distance[0, 4]
        assert 0.02 < same < 0.06
        assert (near > 2 * same and far > near) == separated
        assert separated or max(near, far) < 0.1


# Arms ------------------------------------------------------------------------------------------------------------


def test_arms_are_the_trainers_pipeline(small, samples):
    """Same totals as CreditPipeline, to the last bit, although inputs are shared between arms."""
    base = BipaceConfig(epsilon=0.05, gamma=0.9)
    wanted = [one for one in (*arms.MAIN, *arms.choice_arms()) if one.estimator not in arms.REFERENCES]
    panel = arms.Panel(small, wanted, base)
    for sample in samples[:2]:
        got = panel.run(sample)
        for one in wanted:
            config = one.config(base)
            if one.estimator.startswith("ngram"):
                config = replace(config, epsilon=panel.epsilon_of(one))
            credit = CreditPipeline(one.estimator, config).run(sample.trajectories, sample.phi)
            assert np.array_equal(got[one][1], credit.values.numpy()), one.label
            step = [credit.columns[source]["advantage_step"] for source in credit.sources]
            assert np.array_equal(got[one][0], step), one.label


def test_references_are_the_truth(small, samples):
    sample = next(s for s in samples if any(t.success for t in s.trajectories))
    panel = arms.Panel(small, [arms.arm(arms.TRUE_A), arms.arm(arms.TRUE_V)], BipaceConfig(gamma=0.9))
    steps = {one.estimator: step for one, (step, _) in panel.run(sample).items()}
    a, v, _ = arms.exact(small, sample)
    assert np.array_equal(steps[arms.TRUE_A], a)
    returns = [
        sum(0.9**k * s.reward for k, s in enumerate(t.steps[i:]))
        for t in sample.trajectories
        for i in range(len(t.steps))
    ]
    assert steps[arms.TRUE_V] == pytest.approx(np.array(returns) - v)


def test_another_gamma_than_the_truths_is_refused(small):
    with pytest.raises(ValueError, match="gamma: got 0.95, allowed: the world's 0.9"):
        arms.Panel(small, [arms.arm("gigpo")], BipaceConfig(gamma=0.95))


# Measures --------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_mean_is_students():
    x, batch = np.array([1.0, 2.0, 4.0, 9.0]), np.arange(4)
    mean = measures.of_sums(lambda s: s[..., 1] / s[..., 0], np.stack([np.ones(4), x], 1), batch, 4)
    assert mean.value == 4
    assert mean.half_width == pytest.approx(3.182446 * np.std(x, ddof=1) / 2)
    assert (mean - mean).half_width == 0 == (mean - mean).value


def test_error_is_split_into_bias_and_variance():
    """Two actions in one state, errors 1 + b +- noise: bias by action b = +-0.5, shared bias 1, noise 2."""
    batches = 40
    batch = np.repeat(np.arange(batches), 2)
    cell = np.tile([0, 1], batches)
    truth = np.tile([3.0, -3.0], batches)
    noise = np.where((batch // 2 + cell) % 2, 2.0, -2.0) * np.where(batch % 2, 1, -1)
    estimate = truth + 1 + np.tile([0.5, -0.5], batches) + noise
    got = measures.accuracy(estimate, truth, (cell, np.zeros_like(cell)), batch, batches)
    assert got["mse"].value == pytest.approx(((1.5**2 + 0.5**2) / 2 + 4) / 9)
    assert got["mean_error"].value == pytest.approx(1)
    # Products of different resamples: (sum^2 - sum of squares) / (R (R - 1)), with mean m and square m^2 + 4.
    r = batches
    squares = [(r * r * m * m - r * (m * m + 4)) / (r * (r - 1)) for m in (1.5, 0.5)]
    assert got["bias2"].value == pytest.approx(np.mean(squares) / 9)
    assert got["bias2"].value + got["variance"].value == pytest.approx(got["mse"].value)
    assert got["bias2_action"].value == pytest.approx(0.25 / 9, abs=0.03)


def test_bias_of_pure_noise_is_zero_on_average():
    """Where squaring the mean error would give variance / visits, this is unbiased: an exact enumeration."""
    batch, cell, zero = np.arange(3), np.zeros(3, dtype=int), np.zeros(3)
    values = []
    for signs in itertools.product((-1.0, 1.0), repeat=3):
        got = measures.accuracy(np.array(signs), zero + 1e-3, (cell, cell), batch, 3)
        values.append(got["bias2"].value * 1e-6)
    assert np.mean(values) == pytest.approx(1e-6)  # the bias is -1e-3 on average: only its square is left
    assert max(values) > 0.9


def test_intervals_of_bias_leave_out_whole_resamples():
    """The fast leave-one-out equals doing it again without the resample."""
    rng = np.random.default_rng(0)
    batch = np.sort(np.concatenate([np.arange(8), rng.integers(8, size=40)]))
    cell, error = rng.integers(3, size=48), rng.standard_normal(48)
    got = measures._square_bias(error, cell, batch, 8)
    for r in range(8):
        keep = batch != r
        again = measures._square_bias(error[keep], cell[keep], np.unique(batch[keep], return_inverse=True)[1], 7)
        assert got.without[r] == pytest.approx(again.value)


def test_agreement_by_hand():
    truth = np.array([1.0, -1.0, 0.5, 0.05])  # root mean square 0.75: the last one has no clear sign
    estimate = np.array([2.0, 1.0, 0.0, -5.0])
    got = measures.agreement(estimate, truth, np.arange(4), 4)
    assert got["sign"].value == pytest.approx(1 / 3) and got["silent"].value == pytest.approx(1 / 3)
    assert got["corr"].value == pytest.approx(np.corrcoef(estimate, truth)[0, 1])
    assert measures.agreement(np.zeros(4), truth, np.arange(4), 4)["corr"].value == 0


def test_cosines_by_hand():
    """Gradients (1, 1), (1, -1), (0, 0) and the exact one along (1, 0)."""
    g = np.array([[1.0, 1.0], [1.0, -1.0], [0.0, 0.0]])
    got = measures.cosines(Directions(g @ g.T, g[:, 0], 1.0))
    assert got["cos"].value == pytest.approx(2 / 3 / math.sqrt(2))
    assert got["pair"].value == 0
    same = np.repeat([[3.0, 4.0]], 4, axis=0)
    got = measures.cosines(Directions(same @ same.T, same[:, 0], 1.0))
    assert [got[k].value for k in ("cos", "pair", "limit")] == pytest.approx([0.6, 1, 0.6])
    assert got["cos"].half_width == pytest.approx(0)


def test_limit_takes_the_noise_out():
    """Gradients of length sqrt(101) around (1, 0): a batch's cosine is 0.1, that of their mean 1."""
    rng = np.random.default_rng(0)
    g = np.concatenate([np.ones((2000, 1)), rng.standard_normal((2000, 100))], axis=1)
    got = measures.cosines(Directions(g @ g.T, g[:, 0], 1.0))
    assert got["cos"].value == pytest.approx(0.1, abs=0.005)
    assert got["limit"].value == pytest.approx(1, abs=2 * got["limit"].half_width)
    assert got["limit"].half_width < 0.1


# A trained model as the policy -----------------------------------------------------------------------------------


def test_every_text_of_a_state_is_found():
    task = plan.tasks(1, wordings=2)[0]
    states = RoomsModel(task).states[:3]
    found = model_world.texts_of(task, states)
    assert [len(texts) for texts in found] == [8, 8, 8]
    assert len({text for texts in found for text in texts}) == 24


def test_answers_are_scored_as_the_model_would(tiny):
    """With cache and shared prefixes, against one plain forward per answer."""
    encode = lambda text: tiny.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    prompts = [encode(text) for text in ("the book is here", "you stand in the hall", "go on")]
    openings = [encode(f"{thought}<action>") for thought in model_world.THOUGHTS[:2]]
    commands = [encode(command) for command in ("go hall", "look around", "go study", "open chest")]
    thought, action, phi = model_world.score_answers(tiny.model, prompts, openings, commands)
    for (i, prompt), (z, opening), (c, command) in itertools.product(*map(enumerate, (prompts, openings, commands))):
        ids = torch.tensor([prompt + opening + command])
        with torch.no_grad():
            out = tiny.model(ids, output_hidden_states=True)
        logp = out.logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        start, body = len(prompt) - 1, len(prompt) + len(opening) - 1
        assert thought[i, z] == pytest.approx(logp[start:body].sum().item(), abs=1e-4)
        assert action[i, z, c] == pytest.approx(logp[body:].sum().item(), abs=1e-4)
        hidden = out.hidden_states[model_world.LAYER][0]
        np.testing.assert_allclose(phi["prompt_end"][i, z], hidden[start], atol=1e-4)
        np.testing.assert_allclose(phi["action_start"][i, z], hidden[body], atol=1e-4)


# The study -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a quick study with one worker, trained models included."""
    out = tmp_path_factory.mktemp("oracle")
    cli.main(["oracle", "--quick", "--workers", "1", "--seed", "3", "--out", str(out)])
    return out


def read(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_study_writes_every_table_and_figure(written):
    rows, changes = read(written / "oracle.csv"), read(written / "oracle_choices.csv")
    assert {row["policy"] for row in rows} == {"demonstrator", plan.MODEL, plan.THINKING}
    assert {row["hidden_state"] for row in rows} == {"healthy", "collapsed", *model_world.POSITIONS}
    assert {row["groups"] for row in rows} == {"2", "4"} and {row["seed"] for row in rows} == {"3"}
    assert {"grpo", "hgpo", "bipace_q", "state_q", "ngram_v", arms.TRUE_A} <= {row["estimator"] for row in rows}
    assert {"environment", "estimator", "seed", "mse", "mse_ci", "step_cos_plan", "total_cos_action"} <= rows[0].keys()
    for row in rows:
        numbers = [
            v for k, v in row.items() if k not in ("environment", "policy", "hidden_state", "estimator", "options")
        ]
        assert all(math.isfinite(float(v)) for v in numbers if v), row
        if row["estimator"] == arms.TRUE_A:
            assert float(row["mse"]) == 0 and float(row["step_corr"]) == 1
    assert len(changes) == len(arms.choice_arms()) * 2  # base, and the model where the action starts
    page = (written / "oracle.md").read_text()
    assert "seed 3, 6 resamples" in page and f"commit {commit()}" in page
    assert all((written / name).stat().st_size > 10_000 for name in figures.NAMES)


def test_results_do_not_depend_on_the_number_of_workers(written):
    again = tables.rows(study.compute(QUICK, 3, 2, with_models=False))
    once = [row for row in read(written / "oracle.csv") if row["policy"] == "demonstrator"]
    assert len(again) == len(once)
    for a, b in zip(again, once, strict=True):
        assert {k: str(v) for k, v in a.items()} == {k: v for k, v in b.items() if v != "" or a.get(k) == ""}


@pytest.mark.parametrize("flag", ["resamples", "tasks", "workers"])
def test_bad_flags_are_refused(flag, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["oracle", f"--{flag}", "0"])
    assert stop.value.code == 2
    assert f"--{flag}: got 0, allowed:" in capsys.readouterr().err


def test_a_difference_is_bold_only_if_its_interval_excludes_zero():
    without = np.array([0.9, 1.0, 1.1, 1.0])
    assert tables._change(Measure(5.0, without)).startswith("**+5.000")
    assert not tables._change(Measure(0.01, without)).startswith("**")
    assert tables._change(Measure(0.0001, 0.0001 * without)) == "0"
