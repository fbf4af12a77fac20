"""A run that was killed and resumed does what an uninterrupted one does; eval and best checkpoint on the way."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from openrlhf_bipace.runs import RunFolder

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def runs(warm, rooms_tasks, helpers, tmp_path_factory) -> SimpleNamespace:
    """Two episodes of two iterations, once in one go and once killed after the first checkpoint."""
    base = tmp_path_factory.mktemp("resume")

    def flags(name: str) -> dict:
        out = helpers.base_flags(warm, rooms_tasks.train, base / name) | {
            "train.num_episodes": 2,
            "agent.context": "window",
            "agent.history": 1,
            "bipace.epsilon": "auto",
            "eval.dataset": rooms_tasks.held_out,
            "eval.steps": 2,
            "eval.n_samples_per_prompt": 1,
            "ckpt.load_enable": None,
        }
        del out["ckpt.disable_ds"]
        return out

    helpers.run_module("openrlhf_bipace.cli.train_ppo_ray", helpers.argv(flags("whole")), base)
    kill_after_checkpoint(helpers.argv(flags("killed")), base / "killed", helpers.root)
    before = (base / "killed" / "run" / "metrics.jsonl").read_text()
    # What the next attempt must forget: a line and a dump of an iteration whose checkpoint was never written.
    (base / "killed" / "run" / "metrics.jsonl").write_text(before + json.dumps({"step": 2, "stale": 1.0}) + "\n")
    resumed = helpers.run_module("openrlhf_bipace.cli.train_ppo_ray", helpers.argv(flags("killed")), base)
    return SimpleNamespace(
        whole=RunFolder(base / "whole" / "run"), killed=RunFolder(base / "killed" / "run"), base=base, output=resumed
    )


def kill_after_checkpoint(words: list[str], out: Path, root: Path) -> None:
    """Start a run, and SIGKILL it and every process it started as soon as a checkpoint is complete."""
    command = [sys.executable, "-m", "openrlhf_bipace.cli.train_ppo_ray", *words]
    out.mkdir()
    with (out / "log").open("w") as log:
        run = psutil.Popen(command, cwd=out, env={**os.environ, "PYTHONPATH": str(root)}, stdout=log, stderr=log)
    latest = out / "checkpoints" / "_actor" / "latest"
    deadline = time.monotonic() + 300
    while not latest.exists():
        assert run.poll() is None and time.monotonic() < deadline, (out / "log").read_text()[-4000:]
        time.sleep(0.05)
    for process in [run, *run.children(recursive=True)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    run.wait()


def by_step(folder: RunFolder) -> dict[int, dict[str, float]]:
    return {int(line["step"]): line for line in folder.metrics() if "agent/success" in line}


def turns(folder: RunFolder, step: int) -> list[tuple]:
    from openrlhf_bipace.rollout.dump import read_rollouts

    rows = read_rollouts(folder.rollouts / f"step_{step:06d}.parquet")
    return [(r["group"], r["sample"], r["turn"], r["task"], r["prompt_ids"], r["response_ids"]) for r in rows]


def test_the_resumed_run_took_up_where_the_checkpoint_was(runs):
    started = [line for line in runs.output.splitlines() if "rows, " in line and "trajectories" in line]
    assert len(started) < 4, "the resumed run began anew"
    assert sorted(by_step(runs.killed)) == sorted(by_step(runs.whole)) == [1, 2, 3, 4]
    assert not any("stale" in line for line in runs.killed.metrics())


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_same_prompts_samples_and_updates(runs, step):
    """Across the end of an episode too; every token is the same, so weights, optimizer and epsilon came back."""
    assert turns(runs.killed, step) == turns(runs.whole, step)
    one, other = by_step(runs.killed)[step], by_step(runs.whole)[step]
    for name in ("actor_grad_norm", "actor_lr", "policy_loss", "bipace/epsilon", "agent/reward"):
        assert one.get(name) == pytest.approx(other.get(name), rel=1e-4, abs=1e-7), name


def test_best_checkpoint_and_evaluation_during_training(runs):
    evaluated = [int(line["step"]) for line in runs.whole.metrics() if "eval/success" in line]
    assert evaluated == [2, 4]
    best = [path.name for path in (runs.base / "whole" / "checkpoints" / "_actor").glob("best_*")]
    assert len(best) == 1
    kept = json.loads((runs.base / "whole" / "checkpoints" / "_actor" / best[0] / "metric.json").read_text())
    assert kept["metric_key"] == "eval_rooms_pass1"


def test_a_resume_without_a_checkpoint_says_so(runs):
    assert "no checkpoint in" in (runs.base / "killed" / "log").read_text()
