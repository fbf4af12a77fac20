"""The real stack end to end: Ray, DeepSpeed and vLLM, through the real command line, proved with numbers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.stack

LAYOUTS = {
    "zero2": {"ds.zero_stage": 2},
    "window-two-ranks": {
        "agent.context": "window",
        "agent.history": 1,
        "ds.zero_stage": 2,
        "actor.num_gpus_per_node": 2,
        "actor.gradient_checkpointing_enable": None,
        "train.batch_size": 8,  # two optimizer steps
        "train.micro_batch_size": 3,
        "rollout.micro_batch_size": 5,
        "bipace.loss_agg": "turn",
    },
    "zero3-kl": {
        "ds.zero_stage": 3,
        "algo.kl.init_coef": 0.01,
        "algo.kl.use_loss": None,
        "algo.kl.estimator": "k3",
    },
}


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request, warm, rooms_tasks, helpers, tmp_path_factory) -> SimpleNamespace:
    """Two iterations in one layout, greedy evaluation before and after each, every checkpoint kept."""
    out = tmp_path_factory.mktemp(request.param)
    flags = helpers.base_flags(warm, rooms_tasks.train, out) | {
        "eval.dataset": rooms_tasks.held_out,
        "eval.steps": 1,
        "eval.temperature": 0,
        "eval.n_samples_per_prompt": 1,
        "agent.eval_at_start": None,
        "bipace.dump_hidden": None,
        "logger.tensorboard_dir": out / "tensorboard",
        **LAYOUTS[request.param],
    }
    output = helpers.run_module("openrlhf_bipace.cli.train_ppo_ray", helpers.argv(flags), out)
    folder = out / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return SimpleNamespace(
        name=request.param,
        out=out,
        output=output,
        rollouts=folder / "rollouts",
        train=[line for line in lines if "agent/success" in line],
        eval=[line for line in lines if "eval/success" in line],
        # weights that acted in iteration k, and that the evaluation after iteration k saw
        weights=[warm, *(out / "checkpoints" / f"global_step{k}_hf" for k in (1, 2))],
    )


def test_metrics_are_finite_and_complete(run):
    assert [line["step"] for line in run.train] == [1, 2]
    assert [line["step"] for line in run.eval] == [0, 1, 2]
    for line in run.train:
        assert all(math.isfinite(v) for v in line.values())
        assert line["agent/trajectories"] == 16 and line["agent/failed"] == 0
        assert line["actor_grad_norm"] > 0
        assert abs(line["vllm_kl"]) < 1e-3  # fp32 on both sides
        for name in (
            "cluster_singleton_rate", "row_singleton_rate", "cluster_size_mean", "cluster_size_p90", "giant_share",
            "matched_pairs", "rows_pace", "rows_fallback", "rows_singleton", "clusters_multi_key", "keys_per_cluster",
            "parse_rate", "return_std_within", "purity", "seconds_hidden", "seconds_clustering", "seconds_advantages",
        ):  # fmt: skip
            assert f"bipace/{name}" in line
    if "kl" in run.name:
        assert run.train[0]["kl"] == pytest.approx(0, abs=1e-4) and run.train[1]["kl"] > 0


def test_run_folder_is_complete(run):
    config = json.loads((run.out / "run" / "config.json").read_text())
    assert config["bipace"]["epsilon"] == 0.1 and config["versions"]["ray"] == "2.55.0"
    assert list((run.out / "tensorboard").rglob("events.out.tfevents.*"))
    assert (run.out / "final" / "model.safetensors").exists()
    assert run.output.count("no CUDA device: CPU backend on") == 1


def test_weights_changed_and_reached_the_engine(run, helpers):
    """After every sync the engine's greedy tokens equal transformers' for the new weights, prefix cache on (C25)."""
    answers = []
    for k, weights in enumerate(run.weights):
        model = helpers.model_of(weights)
        tokens = []
        for turns in helpers.training_rows(run.rollouts / f"eval_{k:06d}.parquet"):
            context: list[int] = []
            for turn in turns:
                context += turn["prompt_ids"]
                ids = torch.tensor([context])
                length = len(turn["response_ids"])
                with torch.no_grad():
                    options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
                    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
                    greedy = greedy[0, len(context) :].tolist()
                assert greedy == turn["response_ids"], f"{run.name}, weights {k}, turn {turn['turn']}"
                context += turn["response_ids"]
                tokens.append(turn["response_ids"])
        answers.append(tokens)
    assert answers[0] != answers[2]  # else the comparison above could not tell old weights from new ones
    difference = max(
        (a - b).abs().max().item()
        for a, b in zip(
            helpers.model_of(run.weights[0]).parameters(), helpers.model_of(run.weights[2]).parameters(), strict=True
        )
    )
    assert difference > 3e-4


def test_hidden_vectors_equal_transformers(run, helpers):
    """hidden_states[-2] at the last prompt token of every turn, of the weights that scored the rollout."""
    for k in (1, 2):
        model = helpers.model_of(run.weights[k - 1])
        for turns in helpers.training_rows(run.rollouts / f"step_{k:06d}.parquet")[:6]:
            tokens: list[int] = []
            positions = []
            for turn in turns:
                tokens += turn["prompt_ids"]
                positions.append(len(tokens) - 1)
                tokens += turn["response_ids"]
            with torch.no_grad():
                states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-2][0]
            got = torch.tensor([turn["hidden"] for turn in turns])
            torch.testing.assert_close(got, states[positions], rtol=1e-4, atol=1e-4)
            assert (got - states[[p - 1 for p in positions]]).abs().max() > 0.01


def test_dumped_advantages_are_the_estimators(run, helpers):
    """Recomputed from the dump by the definition: A = episode + (Q - V), leave-one-out for a lone key."""
    rows = [turn for turns in helpers.training_rows(run.rollouts / "step_000001.parquet") for turn in turns]
    keys = {}
    for row in rows:
        keys.setdefault((row["group"], row["cluster"]), []).append(row)
    checked = 0
    for members in keys.values():
        returns = [m["return"] for m in members]
        for m in members:
            same = [o["return"] for o in members if o["key"] == m["key"]]
            assert m["advantage"] == pytest.approx(m["advantage_episode"] + m["advantage_step"])
            if len(members) == 1:
                assert (m["branch"], m["advantage_step"]) == ("SINGLETON", 0)
            elif len(same) > 1:
                expected = sum(same) / len(same) - sum(returns) / len(returns)
                assert m["advantage_step"] == pytest.approx(expected, abs=1e-9)
                checked += 1
    assert checked > 0
