"""Shared fixtures: a tiny model with a real tokenizer, task files, and a way to run the real trainer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models gain nothing from a second thread and lose a lot where the cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def data_folder(env: str) -> Path:
    """The folder with `env`'s data, from BIPACE_DATA. Skips the test if it is not there."""
    root = Path(os.environ.get("BIPACE_DATA", ROOT.parent / "shared" / "data"))
    if not (root / env).is_dir():
        pytest.skip(f"{env}'s data are not here: there is no {root / env} (BIPACE_DATA names the folder above it)")
    return root / env


@pytest.fixture(scope="session")
def webshop_data() -> Path:
    """WebShop's real catalogue."""
    pytest.importorskip("bm25s", reason="pip install openrlhf_bipace[webshop]")
    return data_folder("webshop")


@pytest.fixture(scope="session")
def alfworld_data(tmp_path_factory) -> Path:
    """A folder with ALFWorld's real games; of an archive, valid_seen and some of train are unpacked."""
    pytest.importorskip("alfworld", reason="pip install openrlhf_bipace[alfworld]")
    folder = data_folder("alfworld")
    archives = sorted(folder.glob("games_*.tar.xz"))
    if (folder / "json_2.1.1").is_dir() or not archives:
        return folder
    unpacked = tmp_path_factory.mktemp("alfworld")
    wanted = ["json_2.1.1/valid_seen", "json_2.1.1/train/pick_and_place_simple-Mug*"]
    subprocess.run(["tar", "-xf", archives[0], "-C", unpacked, "--wildcards", *wanted], check=True)
    return unpacked


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> SimpleNamespace:
    """An untrained Qwen2 of three layers whose tokenizer knows the words of `rooms`: folder, model, tokenizer."""
    from openrlhf_bipace.lab import tiny as lab

    folder = tmp_path_factory.mktemp("model")
    tokenizer = lab.build_tokenizer(lab.corpus("rooms"))
    model = lab.build_model(tokenizer, layers=3, hidden=64, heads=2, kv_heads=1, seed=0)
    lab.save(model, tokenizer, folder)
    return SimpleNamespace(folder=folder, model=model.eval(), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def rooms_tasks(tmp_path_factory) -> SimpleNamespace:
    """Task files of `rooms`: `train` (8 tasks) and `held_out` (4 tasks)."""
    from openrlhf_bipace import envs
    from openrlhf_bipace.data import write_tasks

    folder = tmp_path_factory.mktemp("tasks")
    files = SimpleNamespace(train=folder / "train.jsonl", held_out=folder / "held_out.jsonl")
    cls = envs.env_class("rooms")
    write_tasks(files.train, cls.tasks("train")[:8])
    write_tasks(files.held_out, cls.tasks("held_out")[:4])
    return files


@pytest.fixture(scope="session")
def warm(tmp_path_factory) -> Path:
    """A policy that gives some valid actions, so that updates are not zero: briefly cloned, three layers."""
    from openrlhf_bipace.lab import tiny, warmstart

    folder = tmp_path_factory.mktemp("warm")
    start = warmstart.clone("rooms", episodes=200, steps=60, progress=False)
    tiny.save(start.model, start.tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def train_ranks():
    """Runs the optimizer steps of prepared batches on DeepSpeed ranks: see `_train_ranks`."""
    return _train_ranks


def _train_ranks(folder: Path, batches, stage: int = 2, entropy_coef: float = 0.01) -> list[dict]:
    """Run one real DeepSpeed process per rank on the model in `folder`; what each wrote."""
    import torch

    torch.save(batches, folder / "batches.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = Path(__file__).with_name("ranks_worker.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), *map(str, (rank, len(batches), port, stage, folder, entropy_coef))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(len(batches))
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(len(batches))]


def base_flags(model: Path, train: Path, out: Path) -> dict[str, object]:
    """Flags of a run that takes two iterations of 4 tasks x 4 rollouts; None stands for a flag without a value."""
    return {
        "actor.model_name_or_path": model,
        "vllm.num_engines": 1,
        "vllm.enable_prefix_caching": None,
        "agent.env": "rooms",
        "agent.template": "terse",
        "agent.max_turns": 4,
        "agent.max_turn_tokens": 8,
        "agent.seed_requests": None,
        "data.prompt_dataset": train,
        "data.label_key": "label",
        "data.max_len": 512,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.micro_batch_size": 4,
        "train.batch_size": 16,
        "train.micro_batch_size": 4,
        "algo.advantage.estimator": "bipace_q",
        "algo.advantage.is_correction_level": "token",
        "algo.kl.init_coef": 0,
        "bipace.layer": -2,
        "bipace.run_dir": out / "run",
        "actor.adam.lr": 1e-3,
        "actor.lr_warmup_ratio": 0,
        "ckpt.output_dir": out / "final",
        "ckpt.path": out / "checkpoints",
        "ckpt.disable_ds": None,
        "ckpt.save_hf": None,
        "ckpt.save_steps": 1,
    }


def argv(flags: dict[str, object]) -> list[str]:
    """A flat command line; a list value gives several words."""
    words: list[str] = []
    for flag, value in flags.items():
        words.append(f"--{flag}")
        words += [] if value is None else [str(v) for v in (value if isinstance(value, list) else [value])]
    return words


def run_module(module: str, words: list[str], folder: Path, timeout: int = 600) -> str:
    """Run ``python -m module words`` in `folder`; its output. Fails the test with the output's end on a bad exit."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env=env,
        text=True,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{module} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def model_of(folder: Path):
    """The checkpoint in `folder` as a transformers model in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def training_rows(path: Path) -> list[list[dict]]:
    """The turns of a dump, one list per training row."""
    from openrlhf_bipace.rollout.dump import read_rollouts

    out: list[list[dict]] = []
    for row in read_rollouts(path):
        if row["new_row"]:
            out.append([])
        out[-1].append(row)
    return out


@pytest.fixture(scope="session")
def helpers() -> SimpleNamespace:
    """The functions above: with importlib mode a test cannot import its conftest."""
    return SimpleNamespace(
        root=ROOT,
        base_flags=base_flags,
        argv=argv,
        run_module=run_module,
        model_of=model_of,
        training_rows=training_rows,
    )
