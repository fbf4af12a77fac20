"""One run: a warm start, an arm, a seed, an engine; what it leaves on disk, and how it is taken up again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf_bipace.lab.compare.arms import ARMS
from openrlhf_bipace.lab.compare.setting import SETTINGS, Setting
from openrlhf_bipace.lab.provenance import commit, machine
from openrlhf_bipace.records import Trajectory

WARM_STARTS = 3  # seeds 0, 1, 2, ... take them in turn
# seeds of the warm starts where they are not 0, 1, 2: clones 1, 4 and 6 solved 9, 7 and 8 %
CLONES = {"rooms_varied": (0, 2, 3), "rooms_confirm": (5, 7, 8)}
# what a warm start depends on
CLONED = [
    "env", "options", "train_tasks", "thoughts", "context", "max_turns", "errors", "episodes", "clone_steps",
    "batch_size",
]  # fmt: skip
TUNING_SEED = 100  # from here on: seeds that choose options and enter no table


@dataclass(frozen=True, slots=True)
class Job:
    """What tells one run from another."""

    work: str  # folder of all runs and warm starts
    setting: str  # key of SETTINGS
    engine: str
    arm: str  # key of ARMS
    seed: int
    changes: tuple[tuple[str, Any], ...] = ()  # of the setting, for tuning and small versions

    @property
    def conditions(self) -> Setting:
        """The setting with its changes."""
        return replace(SETTINGS[self.setting], **dict(self.changes))

    @property
    def warm_start(self) -> int:
        """Number of its warm start. Tuning seeds have one of their own."""
        clones = CLONES.get(self.setting, range(WARM_STARTS))
        return TUNING_SEED if self.seed >= TUNING_SEED else clones[self.seed % WARM_STARTS]

    @property
    def folder(self) -> Path:
        """Where the run leaves its files."""
        return Path(self.work) / self.engine / self.setting / self.arm / f"seed-{self.seed}"

    @property
    def model(self) -> Path:
        """Folder of its warm start."""
        return Path(self.work) / "warm_start" / self.setting / str(self.warm_start)

    @property
    def curve(self) -> Path:
        """File of the finished run's curve."""
        return self.folder / "curve.json"


def prompts(setting: Setting, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Training tasks of iteration after iteration: shuffled passes over the split, the same for every arm."""
    rng, tasks = random.Random(f"compare prompts {seed}"), setting.trained()
    waiting: list[dict[str, Any]] = []
    while True:
        while len(waiting) < setting.tasks:
            waiting += rng.sample(tasks, len(tasks))
        yield waiting[: setting.tasks]
        waiting = waiting[setting.tasks :]


def prepare(job: Job) -> None:
    """Clone the job's warm start, unless it is there."""
    from openrlhf_bipace.lab import settings, tiny, warmstart

    record, setting = job.model / "warm_start.json", job.conditions
    if record.exists():
        refuse_others(record, setting, CLONED)
        return
    start = warmstart.clone(
        setting.env,
        agent=setting.agent,
        tasks=setting.trained(),
        demonstrator=partial(settings.SETTINGS[setting.env].demonstrator, **setting.errors),
        thoughts=setting.thoughts,
        episodes=setting.episodes,
        steps=setting.clone_steps,
        batch_size=setting.batch_size,
        seed=job.warm_start,
        progress=False,
    )
    tiny.save(start.model, start.tokenizer, job.model)
    figures = {"demonstrations": start.demo_success, "loss": start.losses[-1], "setting": asdict(setting)}
    record.write_text(json.dumps(figures, indent=2))


def finished(job: Job) -> bool:
    """Whether the run's curve is there. ValueError where it was run under other conditions."""
    if not job.curve.exists():
        return False
    refuse_others(job.curve, job.conditions, [f.name for f in fields(Setting)])
    return True


def refuse_others(file: Path, setting: Setting, names: Sequence[str]) -> None:
    """ValueError where `file` records another value than `setting` for one of the fields `names`."""
    stored, wanted = json.loads(file.read_text())["setting"], json.loads(json.dumps(asdict(setting)))
    stored = {f.name: f.default for f in fields(Setting)} | stored  # what it lacks was not yet a choice
    for name in names:
        if stored[name] != wanted[name]:
            raise ValueError(
                f"--work: {file} was made with {name} {stored[name]}, allowed: {wanted[name]}, or another folder"
            )


def train(job: Job) -> None:
    """Run `job` in this process and write its curve: the lab engine."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from openrlhf_bipace.lab.compare.learner import Learner
    from openrlhf_bipace.lab.policy import evaluate

    setting, arm = job.conditions, ARMS[job.arm]
    model = AutoModelForCausalLM.from_pretrained(job.model)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    learner = Learner(model, arm.estimator, arm.config(setting), setting.lr)
    evaluated = setting.evaluated()
    stream, lines, trained = prompts(setting, job.seed), [], []
    for iteration in range(setting.iterations + 1):
        if iteration % setting.eval_every == 0:
            # the same draws in every arm and iteration: differences are the policies'
            played = evaluate(model, tokenizer, setting.agent, evaluated, samples=setting.eval_samples, seed=job.seed)
            lines.append({"iteration": iteration, "held_out": success(played), **mean_of(trained)})
            trained = []
        if iteration < setting.iterations:
            draws = job.seed * 10_000 + iteration + 1
            rollouts = evaluate(model, tokenizer, setting.agent, next(stream), samples=setting.samples, seed=draws)
            trained.append({"train": success(rollouts), **learner.update(rollouts)})
    write(job, lines)


def write(job: Job, lines: list[dict[str, float]]) -> None:
    """The run's curve: a line per evaluation, with the means of the training iterations since the one before."""
    job.folder.mkdir(parents=True, exist_ok=True)
    partial = job.curve.with_suffix(".partial")
    source = {"commit": commit(), "machine": machine(), "warm_start": job.warm_start}
    partial.write_text(json.dumps({**source, "setting": asdict(job.conditions), "lines": lines}, indent=1))
    partial.replace(job.curve)


def success(trajectories: Sequence[Trajectory]) -> float:
    """Share that reached the goal."""
    return sum(t.success for t in trajectories) / len(trajectories)


def mean_of(lines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means by name over the lines that have it."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {n: sum(found) / len(found) for n in names for found in ([x[n] for x in lines if n in x],)}
