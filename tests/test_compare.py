"""The comparison study: scores and statistics by hand, the lab trainer against the full stack's, a tiny run."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import asdict, replace

import pytest
import torch

from openrlhf_bipace.cli import study as command
from openrlhf_bipace.config import AgentConfig, BipaceConfig
from openrlhf_bipace.lab import policy
from openrlhf_bipace.lab.compare import collect, page, plan, statistics
from openrlhf_bipace.lab.compare.arms import ARMS
from openrlhf_bipace.lab.compare.collect import Curve
from openrlhf_bipace.lab.compare.learner import Learner
from openrlhf_bipace.lab.compare.runs import Job, finished, prompts
from openrlhf_bipace.lab.compare.setting import SETTINGS


def curve(arm: str, seed: int, *held_out: float, engine: str = "lab", setting: str = plan.REASONING) -> Curve:
    lines = tuple({"iteration": float(5 * i), "held_out": y, "train": y / 2} for i, y in enumerate(held_out))
    return Curve(engine, setting, arm, seed, seed % 3, "abc", "a machine", lines)


def test_scores_of_a_curve():
    """Trapezoids: (.2 + .6) / 2 = .4 and (.6 + .4) / 2 = .5 over halves of ten iterations."""
    scores = curve("grpo", 0, 0.2, 0.6, 0.4).scores()
    assert scores["area"] == pytest.approx(0.45)
    assert (scores["peak"], scores["last"], scores["to_50%"]) == (0.6, 0.4, 5)
    assert scores["to_70%"] == 15  # never: one evaluation after the last


def one_stratum(seed: int) -> int:
    return 0


def test_paired_differences_by_hand():
    """Differences .1, .3 and .2: mean .2; the smallest and largest resample means bound the interval."""
    a, b = {0: 0.5, 1: 0.7, 2: 0.6, 9: 0.0}, {0: 0.4, 1: 0.4, 2: 0.4, 8: 1.0}
    found = statistics.paired_difference(a, b, one_stratum)
    assert found.value == pytest.approx(0.2)
    assert 0.1 - 1e-9 <= found.low < 0.19 < 0.21 < found.high <= 0.3 + 1e-9
    with pytest.raises(ValueError, match="no seed in common"):
        statistics.paired_difference({0: 1.0}, {1: 1.0}, one_stratum)


def test_strata_are_resampled_apart():
    """Two warm starts far apart, no spread within either: the mean is certain. As one stratum it is not."""
    scores = {0: 0.0, 2: 0.0, 1: 1.0, 3: 1.0}
    apart = statistics.mean(scores, lambda seed: seed % 2)
    assert (apart.value, apart.low, apart.high) == (0.5, 0.5, 0.5)
    together = statistics.mean(scores, one_stratum)
    assert together.low < 0.5 < together.high


def test_probability_of_improvement_by_hand():
    """Of the pairs of (3, 1) and (2, 1): 3 > 2, 3 > 1, 1 < 2 and a tie: 2.5 of 4."""
    found = statistics.probability_of_improvement({0: 3.0, 1: 1.0}, {0: 2.0, 1: 1.0}, one_stratum)
    assert found.value == pytest.approx(2.5 / 4)


def test_interquartile_mean_by_hand():
    """Of 0, 1, 2, 9 the middle half is 1 and 2."""
    assert statistics.interquartile_mean({0: 9.0, 1: 1.0, 2: 0.0, 3: 2.0}, one_stratum).value == pytest.approx(1.5)


def test_sign_flips_and_holm_by_hand():
    """Four equal differences: of 16 sign patterns 2 are as extreme. Holm: 3 x .01, 2 x .03, 1 x .04 made monotone."""
    a, b = dict.fromkeys(range(4), 1.0), dict.fromkeys(range(4), 0.0)
    assert statistics.sign_flip_p(a, b) == pytest.approx(2 / 16)
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_page_and_figures_come_from_the_committed_file_alone(tmp_path, capsys):
    rng = random.Random(0)
    gain = {"grpo": 0.0, "one_v": 0.1, "bigpo": 0.1, "bipace_q": 0.3}
    curves = [
        curve(arm, s, 0.2, *(0.3 + g + 0.02 * rng.random() for _ in "ab")) for arm, g in gain.items() for s in range(9)
    ]
    collect.write(curves, tmp_path / collect.FILE)
    assert collect.read(tmp_path / collect.FILE)[0].held_out == [
        (i, pytest.approx(y, abs=1e-4)) for i, y in curves[0].held_out
    ]
    command.main(["compare", "--draw", "--out", str(tmp_path)])
    page = (tmp_path / "compare.md").read_text()
    row = next(line for line in page.splitlines() if "`bipace_q` - `bigpo`" in line)
    assert "| 9 | +0.1" in row and row.endswith("**yes** |")
    assert "**yes**" not in next(line for line in page.splitlines() if "`bigpo` - `one_v`" in line)
    assert {f.name for f in tmp_path.glob("*.png")} == {"compare_curves.png", "compare_differences.png"}
    (tmp_path / collect.FILE).write_text("a,b\n")
    with pytest.raises(SystemExit):
        command.main(["compare", "--draw", "--out", str(tmp_path)])
    assert "a file that `bipace-study compare` wrote" in capsys.readouterr().err


def test_engines_are_compared_on_common_seeds():
    """Areas .3 and .5 in the lab, .5 and .5 on the full stack; seeds 2 and 3 have no partner."""
    lab = [curve("grpo", 0, 0.3, 0.3), curve("grpo", 1, 0.5, 0.5), curve("grpo", 2, 1.0, 1.0)]
    full = [curve("grpo", seed, 0.5, 0.5, engine="full") for seed in (0, 1, 3)]
    text = page.markdown([*lab, *full])
    assert "| `grpo` | 2 | 0.400 | 0.500 | +0.100 [+0.000, +0.200] |" in text
    assert "against the full stack" not in page.markdown(lab)


def test_every_question_is_planned():
    """Both arms of a question are run with common seeds, in some engine; the paper's with as many as planned."""
    for question in plan.QUESTIONS:
        sizes = [s for (_, setting), s in plan.SIZES.items() if setting == question.setting]
        common = max(min(s.get(question.a, 0), s.get(question.b, 0)) for s in sizes)
        assert common >= (plan.SEEDS if {question.a, question.b} <= {"grpo", *plan.STEP} else plan.FEW) or (
            question.setting == plan.CRAFT and common == 3
        ), question


def test_every_arm_is_planned():
    assert {arm for sizes in plan.SIZES.values() for arm in sizes} == set(ARMS)


def test_jobs_are_paired():
    """Every arm of a seed has the same warm start and the same prompts; three warm starts in turn."""
    jobs = plan.jobs("work", "lab", [plan.REASONING], ["grpo", "bipace_q"], 4)
    assert [(j.arm, j.seed, j.warm_start) for j in jobs[:4]] == [
        ("grpo", 0, 0), ("bipace_q", 0, 0), ("grpo", 1, 1), ("bipace_q", 1, 1),
    ]  # fmt: skip
    assert len(jobs) == 8 and jobs[6].model == jobs[0].model != jobs[2].model
    setting = SETTINGS[plan.REASONING]
    first, again = prompts(setting, 7), prompts(setting, 7)
    batches = [next(first) for _ in range(61)]
    assert batches[0] == next(again) and batches[0] != next(prompts(setting, 8))
    assert len({task["task_id"] for batch in batches[:60] for task in batch}) == 240  # a pass visits every task once


def test_what_is_trained_and_evaluated():
    """Rooms: every task of both splits. TextCraft: 32 tasks of both depths for both."""
    rooms, craft = SETTINGS[plan.REASONING], SETTINGS[plan.CRAFT]
    assert rooms.trained() == rooms.split("train") and rooms.evaluated() == rooms.split("held_out")
    assert len(craft.trained()) == 32 and craft.evaluated() == craft.trained()
    every = [task["task_id"] for task in craft.split("train")]
    assert [every.index(task["task_id"]) for task in craft.trained()] == list(range(0, 320, 10))
    assert len(replace(rooms, eval_tasks=4).evaluated()) == 4


def test_a_run_from_before_an_option_has_its_default(tmp_path):
    """A finished run that does not record `train_tasks` had 0 of it, which TextCraft does not allow."""
    for name, right in ((plan.ACTION, True), (plan.CRAFT, False)):
        stored = asdict(SETTINGS[name])
        del stored["train_tasks"]
        job = Job(str(tmp_path), name, "lab", "grpo", 0)
        job.folder.mkdir(parents=True)
        job.curve.write_text(json.dumps({"setting": stored}))
        if right:
            assert finished(job)
        else:
            with pytest.raises(ValueError, match="was made with train_tasks 0, allowed: 32"):
                finished(job)


@pytest.fixture(scope="module")
def rollouts(warm):
    """The warm-started model and two groups of its rollouts in context window, some of them long."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(warm)
    tokenizer = AutoTokenizer.from_pretrained(warm)
    agent = AgentConfig(env="rooms", template="terse", context="window", history=0, max_turns=5, max_turn_tokens=8)
    return model, policy.evaluate(model, tokenizer, agent, SETTINGS[plan.ACTION].split("train")[:2], samples=4, seed=1)


CONFIG = BipaceConfig(layer=-2, position="action_start", epsilon=0.05)


@pytest.mark.parametrize("estimator", ["grpo", "gigpo", "bipace_q"])
def test_the_labs_gradient_is_the_written_out_one(rollouts, estimator):
    """Row by row without padding: minus the sum of advantage x log-probability over the number of response tokens."""
    model, trajectories = rollouts
    learner = Learner(model, estimator, CONFIG, lr=1e-3)
    model.zero_grad()
    loss, credit, _ = learner.loss(trajectories)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    tokens = sum(len(s.response_ids) for t in trajectories for s in t.steps)
    for (i, j), value in zip(credit.sources, credit.values.tolist(), strict=True):
        step = trajectories[i].steps[j]
        ids = torch.tensor([step.prompt_ids + step.response_ids])
        logp = model(ids[:, :-1]).logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[len(step.prompt_ids) - 1 :]
        (-value * logp.sum() / tokens).backward()
    assert any(p.grad.abs().max() > 1e-4 for p in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.stack
@pytest.mark.parametrize("estimator", ["gigpo", "bipace_q"])
def test_lab_and_full_stack_agree(train_ranks, rollouts, warm, tmp_path, estimator):
    """The same trajectories and weights: the same advantages, and a DeepSpeed rank makes the same step."""
    from openrlhf_bipace.integration import cpu

    if cpu.needed():
        cpu.install()
    from openrlhf_bipace.advantages.pipeline import CreditPipeline
    from openrlhf_bipace.integration.batches import place_on_ranks, row_item, write_advantages
    from openrlhf_bipace.integration.hidden import capture
    from openrlhf_bipace.rollout.rows import hidden_positions, rows_of

    model, trajectories = rollouts
    learner = Learner(model, estimator, CONFIG, lr=1e-3)
    model.zero_grad()
    loss, credit, _ = learner.loss(trajectories)
    loss.backward()
    pairs = [(i, row) for i, t in enumerate(trajectories) for row in rows_of(t)]
    owners, rows = zip(*pairs, strict=True)
    items = [row_item(trajectories[i], row) for i, row in pairs]
    vectors = []
    for item, (i, row) in zip(items, pairs, strict=True):
        where = [hidden_positions(row, trajectories[i], CONFIG.position)]
        ids = item.sequences[None]
        with torch.no_grad(), capture(model, CONFIG.layer, where, torch.ones_like(ids)) as hidden:
            every = model(ids).logits[0, :-1].log_softmax(-1)
        item.action_log_probs = every.gather(1, item.sequences[1:, None])[:, 0] * item.action_mask
        item.base_action_log_probs = item.rollout_log_probs = item.action_log_probs
        vectors += hidden().vectors
    full = CreditPipeline(estimator, CONFIG).run(trajectories, torch.cat(vectors))
    assert full.sources == credit.sources
    torch.testing.assert_close(full.values, credit.values)
    write_advantages(items, rows, owners, full, [0] * len(rows), "token")
    (tmp_path / "model").symlink_to(warm)
    placed = place_on_ranks(items, [len(row.tokens) for row in rows], [list(range(len(rows)))], 1, {"size": 8})
    (rank,) = train_ranks(tmp_path, placed, entropy_coef=0.0)
    (gradients,) = rank["gradients"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)
    stepped = copy.deepcopy(model)
    for name, parameter in stepped.named_parameters():
        parameter.grad = gradients[name]  # the rank's: Adam's first step turns the smallest difference into its sign
    Learner(stepped, estimator, CONFIG, lr=1e-3).step()
    for name, parameter in stepped.named_parameters():
        torch.testing.assert_close(rank["weights"][name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_a_small_study_runs_and_goes_on_where_it_was(tmp_path, capsys):
    words = ["compare", "--quick", "--settings", plan.ACTION, "--arms", "grpo", "bipace_q", "--workers", "1"]
    words += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    command.main([*words, "--seeds", "1"])
    job = Job(str(tmp_path / "work"), plan.ACTION, "lab", "bipace_q", 0)
    before = job.curve.read_bytes()
    command.main([*words, "--seeds", "2"])
    assert "(4 runs)" in capsys.readouterr().out
    assert job.curve.read_bytes() == before
    curves = collect.read(tmp_path / "out" / collect.FILE)
    assert [(c.arm, c.seed, [i for i, _ in c.held_out]) for c in curves] == [
        (arm, seed, [0, 1, 2]) for arm in ("bipace_q", "grpo") for seed in (0, 1)
    ]
    with pytest.raises(SystemExit):
        command.main([word for word in words if word != "--quick"])
    assert "was made with max_turns 4, allowed: 16, or another folder" in capsys.readouterr().err
    job.curve.unlink()
    command.main([*words, "--seeds", "2"])
    assert [c.lines for c in collect.read(tmp_path / "out" / collect.FILE)] == [c.lines for c in curves]


@pytest.mark.stack
def test_a_small_study_through_the_full_stack(tmp_path):
    """The same files from bipace-train: a held-out score per evaluation, and the first one is the warm start's."""
    words = ["compare", "--quick", "--engine", "full", "--settings", plan.VARIED, "--arms", "bipace_q"]
    command.main([*words, "--seeds", "1", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")])
    (curve,) = collect.read(tmp_path / "out" / collect.FILE)
    assert (curve.engine, curve.arm, [i for i, _ in curve.held_out]) == ("full", "bipace_q", [0, 1, 2])
    assert all(0 <= y <= 1 for _, y in curve.held_out) and "train" in curve.lines[-1]
    assert 0 < curve.lines[-1]["bipace/purity"] <= 1 and curve.lines[-1]["health/entropy"] > 0


def test_bad_flags_are_named(tmp_path, capsys):
    for words, wanted in (
        (["--workers", "0"], "--workers: got 0"),
        (["--seeds", "-1"], "--seeds: got -1"),
        (["--engine", "full", "--arms", "hgpo"], "nothing that is planned"),
        (["--collect"], "a folder with finished runs"),
        (["--draw"], "compare.csv"),
    ):
        with pytest.raises(SystemExit):
            command.main(["compare", *words, "--work", str(tmp_path), "--out", str(tmp_path)])
        assert wanted in capsys.readouterr().err
    assert all(arm.config(SETTINGS[plan.REASONING]) for arm in ARMS.values())
