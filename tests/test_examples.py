"""Every shipped script runs, or is at least understood flag by flag."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack
SCRIPTS = Path(__file__).parent.parent / "examples" / "scripts"


def run(script: str, *words: str, **env: str) -> subprocess.CompletedProcess:
    everything = {**os.environ, "PYTHON": sys.executable, **env}
    command = ["bash", str(SCRIPTS / script), *words]
    return subprocess.run(command, env=everything, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def warm_starts(tmp_path_factory) -> Path:
    """Where the first run of each environment leaves its warm start for the others."""
    return tmp_path_factory.mktemp("warm_starts")


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("context", ["full", "window"])
@pytest.mark.parametrize("env", ["rooms", "textcraft"])
def test_trains_in_every_mode(env, context, mode, warm_starts, tmp_path):
    """Three iterations: finite losses, every diagnostic, epsilon chosen by `auto`, rows as the context says."""
    out = tmp_path / "run"
    small = {"ITERATIONS": "3", "CLONE_STEPS": "60", "EPISODES": "80", "WARM_START": str(warm_starts / env)}
    done = run("train_cpu.sh", env, context, mode, OUT=str(out), **small)
    assert done.returncode == 0, done.stdout[-6000:]
    lines = metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert line["agent/trajectories"] == 32 and line["agent/failed"] == 0
        assert {"bipace/r2", "bipace/epsilon", "bipace/rows_pace", "bipace/purity", "policy_loss"} <= line.keys()
        assert {"phase/old_logprobs", "health/entropy", "agent/staleness_max"} <= line.keys()
        assert line["agent/staleness_max"] <= (2 if mode == "async" else 0)
    assert any(line["actor_grad_norm"] > 0 for line in lines)
    rows = [word for word in done.stdout.split("\n") if " rows, " in word and " turns, 32 trajectories" in word]
    assert len(rows) == 3
    training_rows, turns = re.search(r"(\d+) rows, (\d+) turns", rows[0]).groups()
    assert training_rows == (turns if context == "window" else "32")
    assert (out / "report.md").exists() and (out / "learning_curve.png").exists()
    assert (out / "checkpoint" / "model.safetensors").exists()


@pytest.mark.parametrize("env", ["alfworld", "webshop"])
def test_environments_with_data_train(env, request, tmp_path):
    """Three iterations each: finite losses, no failed episode, real states."""
    data, out = request.getfixturevalue(f"{env}_data"), tmp_path / env
    steps = "80" if env == "alfworld" else "20"  # WebShop's pages are long
    done = run("train_data_cpu.sh", env, DATA=str(data), OUT=str(out), CLONE_STEPS=steps, EPISODES="40")
    assert done.returncode == 0, done.stdout[-6000:]
    lines = metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert line["agent/trajectories"] == 16 and line["agent/failed"] == 0
        assert {"bipace/purity", "policy_loss"} <= line.keys()
    assert (out / "report.md").exists() and (out / "checkpoint" / "model.safetensors").exists()


def test_goes_on_from_a_checkpoint(warm_starts, tmp_path):
    """Asynchronous, with clustering workers: iterations 3 and 4 follow 1 and 2."""
    out = tmp_path / "run"
    small = {"ITERATIONS": "2", "CLONE_STEPS": "60", "EPISODES": "80", "WARM_START": str(warm_starts / "rooms_short")}
    more = ("rooms", "window", "async", "--bipace.cluster_workers", "2")
    first = run("train_cpu.sh", *more, OUT=str(out), **small)
    assert first.returncode == 0, first.stdout[-6000:]
    second = run("train_cpu.sh", *more, "--train.num_episodes", "2", OUT=str(out), RESUME="1", **small)
    assert second.returncode == 0, second.stdout[-6000:]
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4]


def test_the_gpu_script_is_understood_up_to_what_needs_a_gpu(tiny, tmp_path):
    """Without CUDA it is refused at the first flag that needs it; an unknown flag would be refused before."""
    from openrlhf_bipace.integration import cpu

    if not cpu.needed():
        pytest.skip("would train a 7B model on this machine's GPUs")
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    shim.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run("train_bipace_7b.sh", TASKS="tasks.jsonl", MODEL=str(tiny.folder), OUT=str(tmp_path / "o"), PATH=path)
    assert done.returncode == 2
    assert "bipace-train: error: --ds.packing_samples: got True, allowed without CUDA: False" in done.stdout


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sh")))
def test_scripts_are_valid_bash(script):
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True)
