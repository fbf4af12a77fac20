"""The full engine: the same job through ``bipace-train``, that is Ray, vLLM and DeepSpeed, in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import fields
from itertools import islice
from pathlib import Path

from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.data import write_tasks
from openrlhf_bipace.lab.compare.arms import ARMS
from openrlhf_bipace.lab.compare.runs import Job, mean_of, prompts, write
from openrlhf_bipace.runs import RunFolder

RUN = "run"  # the trainer's run folder inside the job's
LOG = "train.log"


def train(job: Job) -> None:
    """Run `job` and write its curve. RuntimeError with the log's last lines when it fails."""
    shutil.rmtree(job.folder, ignore_errors=True)  # an attempt that was cut off
    job.folder.mkdir(parents=True)
    setting = job.conditions
    tasks = [task for batch in islice(prompts(setting, job.seed), setting.iterations) for task in batch]
    write_tasks(job.folder / "train.jsonl", tasks)
    write_tasks(job.folder / "held_out.jsonl", setting.evaluated())
    log = job.folder / LOG
    with log.open("w") as file:
        command = [sys.executable, "-m", "openrlhf_bipace.cli.train_ppo_ray", *flags(job)]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{tail}\n{job.folder}: bipace-train ended with exit code {done.returncode}; log: {log}")
    write(job, curve(job.folder / RUN))
    for heavy in ("checkpoint", "checkpoints", "rollouts"):
        shutil.rmtree(job.folder / RUN / heavy, ignore_errors=True)


def flags(job: Job) -> list[str]:
    """The command line of the job, as a user would write it."""
    setting, arm = job.conditions, ARMS[job.arm]
    trajectories = setting.tasks * setting.samples
    values = {
        "actor.model_name_or_path": job.model,
        "data.prompt_dataset": job.folder / "train.jsonl",
        "data.label_key": "label",
        "data.max_len": 1024,
        "vllm.num_engines": 1,
        "rollout.batch_size": setting.tasks,
        "rollout.n_samples_per_prompt": setting.samples,
        "rollout.micro_batch_size": trajectories,
        "train.batch_size": trajectories,
        "train.micro_batch_size": trajectories,
        "train.seed": job.seed,
        "actor.adam.lr": setting.lr,
        "actor.lr_warmup_ratio": 0,
        "actor.lr_scheduler": "constant",
        "algo.kl.init_coef": 0,
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.estimator": arm.estimator,
        "eval.dataset": job.folder / "held_out.jsonl",
        "eval.steps": setting.eval_every,
        "eval.temperature": 1.0,
        "eval.n_samples_per_prompt": setting.eval_samples,
        "ckpt.output_dir": job.folder / RUN / "checkpoint",
        "ckpt.path": job.folder / RUN / "checkpoints",
        "bipace.run_dir": job.folder / RUN,
        "agent.env": setting.env,
        "agent.template": "terse",
        "agent.context": setting.context,
        "agent.history": 0,
        "agent.max_turns": setting.max_turns,
        "agent.max_turn_tokens": setting.max_turn_tokens,
        **_changed(arm.config(setting)),
    }
    words = [word for flag, value in values.items() for word in (f"--{flag}", str(value))]
    return [*words, "--vllm.enable_prefix_caching", "--agent.seed_requests", "--agent.eval_at_start"]


def _changed(config: BipaceConfig) -> dict[str, object]:
    """The estimator's options that are not their defaults, as flags."""
    default = BipaceConfig()
    names = [f.name for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    return {f"bipace.{name}": getattr(config, name) for name in names}


def curve(run: Path) -> list[dict[str, float]]:
    """A finished run's metrics.jsonl in the lab's form."""
    lines, trained = [], []
    for line in RunFolder(run).metrics():
        if "eval/success" in line:
            held_out = {"iteration": line["step"], "held_out": line["eval/success"]}
            lines.append({**held_out, **mean_of(trained)})
            trained = []
        else:
            kept = {n: v for n, v in line.items() if n.startswith(("bipace/", "health/", "phase/"))}
            trained.append({"train": line["agent/success"], **kept})
    return lines
