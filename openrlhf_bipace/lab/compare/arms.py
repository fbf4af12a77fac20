"""What is compared: estimators with the options that differ from the setting's. To add an arm, add a line."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.lab.compare.setting import Setting


@dataclass(frozen=True, slots=True)
class Arm:
    """One estimator with its options."""

    estimator: str  # of `advantages.names()`
    options: dict[str, Any] = field(default_factory=dict)  # `BipaceConfig` fields

    def config(self, setting: Setting) -> BipaceConfig:
        """The setting's configuration with this arm's options."""
        return replace(BipaceConfig(**setting.bipace), **self.options)


# The position's own best epsilon by leave-one-out R^2, as every epsilon here: measured on a warm start of its own.
PROMPT_END = {"position": "prompt_end", "epsilon": 0.002}
WEAK = {"w": 1.0}  # the step part at a tenth of the paper's scale: the paper's success pays 10, ours 1
ARMS = {
    "grpo": Arm("grpo"),
    "one_v": Arm("one_v"),  # control: one part per group
    "gigpo": Arm("gigpo"),
    "bigpo": Arm("bigpo"),
    "bipace_q": Arm("bipace_q"),
    "bipace_q_prompt_end": Arm("bipace_q", PROMPT_END),
    "bipace_eb": Arm("bipace_eb"),
    "bipace_hgpo": Arm("bipace_hgpo"),
    "grpo_mean": Arm("grpo", {"episode_mode": "mean"}),
    "hgpo": Arm("hgpo"),
    "bipace_diff": Arm("bipace_diff"),
    "pace_q": Arm("pace_q"),
    "bipace_q_shrunk": Arm("bipace_q", {"shrink": 1.0}),
    "state_q": Arm("state_q"),
    "ngram_q": Arm("ngram_q", {"epsilon": 0.4}),
    "one_v_w1": Arm("one_v", WEAK),
    "gigpo_w1": Arm("gigpo", WEAK),
    "bigpo_w1": Arm("bigpo", WEAK),
    "bipace_q_w1": Arm("bipace_q", WEAK),
    "bipace_q_prompt_end_w1": Arm("bipace_q", PROMPT_END | WEAK),
}
