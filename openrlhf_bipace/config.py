"""Every flag this project adds, once: its default, its help, what it allows.

`BipaceConfig().epsilon` is ``--bipace.epsilon``, `AgentConfig().context` is ``--agent.context``. To add a flag, add a
field.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


def _flag(default: Any, help: str, choices: list[str] | None = None, parse: Callable | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "parse": parse})


def _epsilon(text: str) -> float | str:
    return "auto" if text == "auto" else float(text)


@dataclass(slots=True)
class BipaceConfig:
    """The estimator: partition of the steps, baseline inside each part, how the two advantages are combined.

    Defaults marked [paper] follow arXiv 2606.25556, those marked [ours] fill a silence of it; see docs/estimators.md.
    """

    layer: int = _flag(-8, "decoder layer whose output is compared: transformers' hidden_states[layer] [paper, 7B]")
    epsilon: float | str = _flag(
        0.10, "cosine distance within which two steps share a state, or 'auto' [paper, 7B]", parse=_epsilon
    )
    position: str = _flag(
        "prompt_end",
        "where the hidden state is read: the last prompt token [paper] or the token before the action [ours]",
        ["prompt_end", "action_start"],
    )
    centroid: str = _flag("mean", "a cluster is compared by its running mean [ours] or first member", ["mean", "seed"])
    order: str = _flag("turn", "order in which a group's steps are clustered", ["turn", "trajectory"])
    scope: str = _flag(
        "group",
        "turns of one part, whatever the partition, come from one prompt group [paper] or from anywhere in the batch",
        ["group", "batch"],
    )
    cluster_backend: str = _flag(
        "auto",
        "how hidden states are clustered; auto, exact and reference give the same labels (docs/clustering.md)",
        ["auto", "reference", "exact", "faiss-flat", "faiss-ivf", "faiss-hnsw"],
    )
    cluster_workers: int = _flag(0, "Ray actors that cluster, hidden states staying off the driver; 0: the driver")
    cluster_gpus: float = _flag(0.0, "GPUs of each clustering worker, may be a fraction")
    gamma: float = _flag(0.95, "discount per turn [paper]")
    w: float = _flag(1.0, "weight of the step advantage: A = A_episode + w * A_step [paper]")
    episode_mode: str = _flag(
        "mean_std", "episode advantage: minus the group mean, or also over its std", ["mean_std", "mean"]
    )
    episode_weighting: str = _flag(
        "step",
        "what the episode mean counts: each step once [verl-agent, the paper] or each trajectory once [ours]",
        ["step", "trajectory"],
    )
    step_std: bool = _flag(False, "divide the step advantage by the part's std of returns")
    fallback: str = _flag(
        "rloo",
        "Q-style, a step whose action no other member took: leave-one-out [paper], self-inclusive Q - V, or 0",
        ["rloo", "q", "zero"],
    )
    single_key: str = _flag(
        "zero", "Q-style, a part whose members all took the same action: 0 [ours] or leave-one-out", ["zero", "rloo"]
    )
    peers: str = _flag(
        "inclusive", "Q-style, does Q count the step itself: yes [paper] or no", ["inclusive", "exclusive"]
    )
    shrink: float = _flag(0.0, "Q - V times n / (n + shrink) for n same-action members; 0 is the paper")
    action_key: str = _flag(
        "action_tag",
        "what makes two actions equal: the <action> body, the first 8 response tokens, or the executed command",
        ["action_tag", "first_tokens", "env"],
    )
    invalid_penalty: float = _flag(0.1, "subtracted from the return and score of a turn without a valid action")
    min_r2: float = _flag(0.02, "epsilon 'auto': below this leave-one-out R^2 the state baseline replaces Q")
    hgpo_k: int = _flag(2, "hgpo: the longest match is this many observations before the current one")
    hgpo_alpha: float = _flag(1.0, "hgpo: a match of k observations weighs (k + 1) ** alpha")
    ngram: int = _flag(2, "ngram partition: length of the word n-grams that are hashed")
    loss_agg: str = _flag(
        "token",
        "what weighs the same in the policy loss of an optimizer step: every response token, turn or trajectory",
        ["token", "turn", "trajectory"],
    )
    run_dir: str = _flag("", "folder for this run's files (default: runs/<--logger.wandb.run_name>)")
    dump_hidden: bool = _flag(False, "store every turn's hidden state in the rollout dump (large)")
    verify_weights: bool = _flag(True, "compare the loaded weights with the model's files before training")
    allow_unknown_host: bool = _flag(False, "run with versions of OpenRLHF, vLLM, ... that were never tested")
    cpu_dtype: str = _flag("fp32", "parameter type without CUDA", ["fp32", "bf16"])

    def __post_init__(self) -> None:
        _check_choices(self, "bipace")
        if self.epsilon != "auto":
            _require(
                isinstance(self.epsilon, (int, float)) and math.isfinite(self.epsilon) and 0.0 <= self.epsilon <= 2.0,
                "--bipace.epsilon",
                self.epsilon,
                "'auto' or a cosine distance in [0, 2]",
            )
        faiss_means = self.cluster_backend.startswith("faiss") and self.centroid != "seed"
        _require(
            not faiss_means,
            "--bipace.cluster_backend",
            self.cluster_backend,
            "auto | reference | exact, or --bipace.centroid seed",
        )
        _require(self.cluster_workers >= 0, "--bipace.cluster_workers", self.cluster_workers, "an integer >= 0")
        _require(
            not (self.dump_hidden and self.cluster_workers),
            "--bipace.dump_hidden",
            self.dump_hidden,
            "False with --bipace.cluster_workers (hidden states do not come to the driver)",
        )
        _require(self.cluster_gpus >= 0, "--bipace.cluster_gpus", self.cluster_gpus, "a number >= 0")
        _require(self.layer <= -2, "--bipace.layer", self.layer, "-2 or lower (-1 is read after the final norm)")
        _require(0.0 <= self.gamma <= 1.0, "--bipace.gamma", self.gamma, "a discount in [0, 1]")
        _require(math.isfinite(self.w) and self.w >= 0, "--bipace.w", self.w, "a finite weight >= 0")
        for name in ("shrink", "invalid_penalty"):
            got = getattr(self, name)
            _require(math.isfinite(got) and got >= 0, f"--bipace.{name}", got, "a finite number >= 0")
        for name in ("hgpo_alpha", "min_r2"):
            _require(math.isfinite(getattr(self, name)), f"--bipace.{name}", getattr(self, name), "a finite number")
        _require(self.hgpo_k >= 0, "--bipace.hgpo_k", self.hgpo_k, "an integer >= 0")
        _require(self.ngram >= 1, "--bipace.ngram", self.ngram, "an integer >= 1")


@dataclass(slots=True)
class AgentConfig:
    """The agent loop: environment, prompt, budgets."""

    env: str = _flag("", "environment to act in, by name or path/to/file.py:Class; empty leaves rollouts to OpenRLHF")
    data: str = _flag("", "folder with the environment's data, where it needs one")
    context: str = _flag(
        "full",
        "what a turn reads: the whole conversation so far, one training row per trajectory, or the task, the last "
        "--agent.history turns and the current observation, one row per turn [paper]",
        ["full", "window"],
    )
    history: int = _flag(2, "context window: earlier turns that the prompt repeats [paper, verl-agent]")
    template: str = _flag(
        "react", "prompt: explain task, commands and answer format, or state only the essentials", ["react", "terse"]
    )
    parser: str = _flag("strict", "how an action is read from a response: ours, or verl-agent's", ["strict", "verl"])
    show_admissible: bool = _flag(False, "list the admissible commands in every observation")
    max_turns: int = _flag(0, "turns per episode (0: the environment's own default)")
    max_turn_tokens: int = _flag(512, "tokens per response; --rollout.max_new_tokens is not a per-turn cap")
    step_timeout: float = _flag(60.0, "seconds an environment may take for a step")
    reset_timeout: float = _flag(300.0, "seconds an environment may take to start an episode")
    env_workers: int = _flag(
        0, "environments at once per rollout actor (0: 1024 threads where safe, else 8 processes per core)"
    )
    env_recycle: int = _flag(500, "episodes after which an environment is replaced by a fresh one (0: never)")
    env_memory: float = _flag(
        4.0, "GiB after which an environment's process is replaced; at twice that its episode fails (0: no limit)"
    )
    seed_requests: bool = _flag(
        False, "seed every response by task, sample and turn: reproducible rollouts, slower for large batches"
    )
    eval_at_start: bool = _flag(False, "evaluate once before the first update")

    def __post_init__(self) -> None:
        _check_choices(self, "agent")
        _require(self.history >= 0, "--agent.history", self.history, "an integer >= 0")
        _require(self.max_turns >= 0, "--agent.max_turns", self.max_turns, "an integer >= 0")
        _require(self.max_turn_tokens >= 1, "--agent.max_turn_tokens", self.max_turn_tokens, "an integer >= 1")
        _require(self.step_timeout > 0, "--agent.step_timeout", self.step_timeout, "seconds > 0")
        _require(self.reset_timeout > 0, "--agent.reset_timeout", self.reset_timeout, "seconds > 0")
        for name in ("env_workers", "env_recycle", "env_memory"):
            _require(getattr(self, name) >= 0, f"--agent.{name}", getattr(self, name), "a number >= 0")


@dataclass(slots=True)
class LaunchConfig:
    """Where it runs: what --dry_run plans for, how long a cluster is waited for."""

    nodes: int = _flag(0, "--dry_run: nodes there are (0: SLURM's, else as many as the flags ask for)")
    gpus_per_node: int = _flag(0, "--dry_run: GPUs a node has (0: this machine's, 8 where there is none)")
    gpu_memory: float = _flag(0.0, "--dry_run: GiB a GPU has (0: this machine's, 80 where there is none)")
    deadline: float = _flag(300.0, "seconds to wait for GPUs that the Ray cluster does not have or has in use")

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "gpu_memory", "deadline"):
            _require(getattr(self, name) >= 0, f"--launch.{name}", getattr(self, name), "a number >= 0")


SECTIONS = {"bipace": BipaceConfig, "agent": AgentConfig, "launch": LaunchConfig}


def _require(ok: bool, flag: str, got: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{flag}: got {got!r}, allowed: {allowed}")


def _check_choices(config: Any, section: str) -> None:
    for f in fields(config):
        choices = f.metadata["choices"]
        got = getattr(config, f.name)
        if choices:
            _require(got in choices, f"--{section}.{f.name}", got, " | ".join(choices))


def add_flags(parser: argparse.ArgumentParser, sections: Sequence[str] = tuple(SECTIONS)) -> None:
    """Add every flag of `sections` to `parser`, one help group per section."""
    for section, cls in ((section, SECTIONS[section]) for section in sections):
        group = parser.add_argument_group(f"openrlhf_bipace: --{section}.*", (cls.__doc__ or "").split("\n")[0])
        for f in fields(cls):
            default = f.default
            options: dict[str, Any] = {"default": default, "help": f.metadata["help"]}
            if isinstance(default, bool):
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = f.metadata["parse"] or type(default)
                options["choices"] = f.metadata["choices"]
                options["metavar"] = None if f.metadata["choices"] else options["type"].__name__.strip("_").upper()
            group.add_argument(f"--{section}.{f.name}", **options)


def from_args(section: str, args: Any) -> BipaceConfig | AgentConfig | LaunchConfig:
    """The section's dataclass from a namespace whose attributes are the flags without the dashes.

    Raises ValueError naming a bad flag.
    """
    cls = SECTIONS[section]
    return cls(**{f.name: getattr(args, f"{section}.{f.name}") for f in fields(cls)})
