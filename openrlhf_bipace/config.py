"""Every flag this project adds, once: its default, its help, what it allows.

`BipaceConfig().epsilon` is ``--bipace.epsilon``, `AgentConfig().context` is ``--agent.context``. To add a flag, add a
field.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
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
    gamma: float = _flag(0.95, "discount per turn [paper]")
    w: float = _flag(1.0, "weight of the step advantage: A = A_episode + w * A_step [paper]")
    episode_mode: str = _flag(
        "mean_std", "episode advantage: minus the group mean, or also over its std", ["mean_std", "mean"]
    )
    episode_weighting: str = _flag(
        "trajectory",
        "what the episode mean counts: each trajectory once [ours] or each step once (verl-agent, the paper's recipe)",
        ["trajectory", "step"],
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

    env: str = _flag("", "environment to act in; empty leaves rollouts to OpenRLHF")
    data: str = _flag("", "folder with the environment's data, where it needs one")
    context: str = _flag("full", "what a turn reads: the whole conversation so far", ["full"])
    template: str = _flag(
        "react", "prompt: explain task, commands and answer format, or state only the essentials", ["react", "terse"]
    )
    parser: str = _flag("strict", "how an action is read from a response: ours, or verl-agent's", ["strict", "verl"])
    show_admissible: bool = _flag(False, "list the admissible commands in every observation")
    max_turns: int = _flag(0, "turns per episode (0: the environment's own default)")
    max_turn_tokens: int = _flag(512, "tokens per response; --rollout.max_new_tokens is not a per-turn cap")
    step_timeout: float = _flag(60.0, "seconds an environment may take to reset or step")
    seed_requests: bool = _flag(
        False, "seed every response by task, sample and turn: reproducible rollouts, slower for large batches"
    )
    eval_at_start: bool = _flag(False, "evaluate once before the first update")

    def __post_init__(self) -> None:
        _check_choices(self, "agent")
        _require(self.max_turns >= 0, "--agent.max_turns", self.max_turns, "an integer >= 0")
        _require(self.max_turn_tokens >= 1, "--agent.max_turn_tokens", self.max_turn_tokens, "an integer >= 1")
        _require(self.step_timeout > 0, "--agent.step_timeout", self.step_timeout, "seconds > 0")


SECTIONS = {"bipace": BipaceConfig, "agent": AgentConfig}


def _require(ok: bool, flag: str, got: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{flag}: got {got!r}, allowed: {allowed}")


def _check_choices(config: Any, section: str) -> None:
    for f in fields(config):
        choices = f.metadata["choices"]
        got = getattr(config, f.name)
        if choices:
            _require(got in choices, f"--{section}.{f.name}", got, " | ".join(choices))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of both sections to `parser`, one help group per section."""
    for section, cls in SECTIONS.items():
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


def from_args(section: str, args: Any) -> BipaceConfig | AgentConfig:
    """The section's dataclass from a namespace whose attributes are the flags without the dashes.

    Raises ValueError naming a bad flag.
    """
    cls = SECTIONS[section]
    return cls(**{f.name: getattr(args, f"{section}.{f.name}") for f in fields(cls)})
