"""Asynchronous training with partial rollouts: whose hidden states, how stale, on which rows."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from openrlhf_bipace.runs import RunFolder

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def run(warm, rooms_tasks, helpers, tmp_path_factory) -> SimpleNamespace:
    """Four iterations; generation goes on while weights change, every checkpoint is kept."""
    out = tmp_path_factory.mktemp("async")
    flags = helpers.base_flags(warm, rooms_tasks.train, out) | {
        "train.async_enable": None,
        "train.partial_rollout_enable": None,
        "train.num_episodes": 2,
        "agent.context": "window",
        "agent.history": 1,
        "bipace.dump_hidden": None,
        "eval.dataset": rooms_tasks.held_out,
        "eval.steps": 2,
        "eval.n_samples_per_prompt": 1,
        "agent.eval_at_start": None,
        "actor.adam.lr": 3e-3,
    }
    output = helpers.run_module("openrlhf_bipace.cli.train_ppo_ray", helpers.argv(flags), out)
    folder = RunFolder(out / "run")
    weights = [warm, *(out / "checkpoints" / f"global_step{k}_hf" for k in (1, 2, 3, 4))]
    lines = {int(line["step"]): line for line in folder.metrics() if "agent/success" in line}
    return SimpleNamespace(out=out, output=output, folder=folder, weights=weights, lines=lines)


def test_every_iteration_says_how_stale_it_was(run, helpers):
    """The log's figures are those of the dump: weight updates between a response's start and the update it serves."""
    assert sorted(run.lines) == [1, 2, 3, 4]
    for k, line in run.lines.items():
        assert all(math.isfinite(value) for value in line.values())
        turns = [turn for row in helpers.training_rows(run.folder.rollouts / f"step_{k:06d}.parquet") for turn in row]
        ages = [k - 1 - turn["weights"] for turn in turns]
        assert all(age >= 0 for age in ages)
        assert line["agent/staleness_max"] == max(ages)
        assert line["agent/staleness_mean"] == pytest.approx(sum(ages) / len(ages))
    assert max(line["agent/staleness_max"] for line in run.lines.values()) >= 1  # else nothing here is asynchronous
    assert "weight updates ago on average" in run.output


def test_hidden_states_are_of_the_weights_that_score_the_batch(run, helpers):
    """Not of the older ones that sampled it: one policy's geometry for all rows of a clustering."""
    stale = next(k for k, line in run.lines.items() if line["agent/staleness_max"] >= 1)
    rows = helpers.training_rows(run.folder.rollouts / f"step_{stale:06d}.parquet")[:8]
    scoring, older = (helpers.model_of(run.weights[k]) for k in (stale - 1, stale - 2))
    difference = 0.0
    for turn in (row[0] for row in rows):
        tokens, position = torch.tensor([turn["prompt_ids"]]), len(turn["prompt_ids"]) - 1
        with torch.no_grad():
            states = [m(tokens, output_hidden_states=True).hidden_states[-2][0, position] for m in (scoring, older)]
        got = torch.tensor(turn["hidden"])
        torch.testing.assert_close(got, states[0], rtol=1e-4, atol=1e-4)
        difference = max(difference, (got - states[1]).abs().max().item())
    assert difference > 1e-3  # the older weights would have been noticed


def test_evaluations_and_best_checkpoint(run):
    steps = [int(line["step"]) for line in run.folder.metrics() if "eval/success" in line]
    assert steps[0] == 0 and 2 in steps
    assert list((run.out / "checkpoints").glob("best_global_step*_hf"))
