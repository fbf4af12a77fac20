"""Every shipped script runs, or is at least understood flag by flag."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack
SCRIPTS = Path(__file__).parent.parent / "examples" / "scripts"


def run(script: str, **env: str) -> subprocess.CompletedProcess:
    everything = {**os.environ, "PYTHON": sys.executable, **env}
    return subprocess.run(
        ["bash", str(SCRIPTS / script)], env=everything, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_textcraft_trains_on_real_recipes(tmp_path):
    """Five iterations of real TextCraft goals: finite losses, every diagnostic, epsilon chosen by `auto`."""
    out = tmp_path / "textcraft"
    done = run("train_textcraft_cpu.sh", OUT=str(out), ITERATIONS="5", CLONE_STEPS="60", EPISODES="80")
    assert done.returncode == 0, done.stdout[-6000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert line["agent/trajectories"] == 32 and line["agent/failed"] == 0
        assert {"bipace/r2", "bipace/epsilon", "bipace/rows_pace", "bipace/purity", "policy_loss"} <= line.keys()
    assert any(line["actor_grad_norm"] > 0 for line in lines)
    scan = json.loads((out / "epsilon.json").read_text())
    assert len(scan["curve"]) == 12 and scan["r2"] == max(r2 for _, r2 in scan["curve"])
    assert (out / "report.md").exists() and (out / "learning_curve.png").exists()
    assert (out / "checkpoint" / "model.safetensors").exists()


@pytest.mark.parametrize("env", ["alfworld", "webshop"])
def test_environments_with_data_train(env, request, tmp_path):
    """Three iterations each: finite losses, no failed episode, real states."""
    data, out = request.getfixturevalue(f"{env}_data"), tmp_path / env
    done = run(f"train_{env}_cpu.sh", DATA=str(data), OUT=str(out), CLONE_STEPS="20", EPISODES="16")
    assert done.returncode == 0, done.stdout[-6000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert line["agent/trajectories"] == 16 and line["agent/failed"] == 0
        assert {"bipace/purity", "policy_loss"} <= line.keys()
    assert (out / "report.md").exists() and (out / "checkpoint" / "model.safetensors").exists()


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
