"""Which runs the study consists of, and the questions it asks: written before the runs (docs/compare.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf_bipace.lab.compare.arms import ARMS
from openrlhf_bipace.lab.compare.runs import Job

SEEDS, FEW = 15, 5  # paired seeds: of the arms that the questions are about, of the rest
SOME = 9  # of the arms with w = 1, stopped there


@dataclass(frozen=True, slots=True)
class Question:
    """Is arm `a` better than arm `b` in the area under the learning curve?"""

    text: str
    setting: str
    a: str
    b: str


REASONING, VARIED, ACTION, CRAFT = "rooms_reasoning", "rooms_varied", "rooms_action", "textcraft"
CONFIRM = "rooms_confirm"
ROOMS = (VARIED, REASONING, ACTION)
THINKING = (VARIED, REASONING)  # settings with reasoning tokens
STEP = ("one_v", "gigpo", "bigpo", "bipace_q")
OURS = ("bipace_eb", "bipace_hgpo")
QUESTIONS = [
    *(Question("Does a step term beat GRPO?", s, a, "grpo") for s in ROOMS for a in STEP),
    *(Question("Does clustering beat one part?", s, a, "one_v") for s in ROOMS for a in STEP[2:]),
    *(Question("Does Q beat V?", s, "bipace_q", "bigpo") for s in ROOMS),
    *(Question("Does `action_start` beat `prompt_end`?", s, "bipace_q", "bipace_q_prompt_end") for s in THINKING),
    *(Question("Does ours beat the paper's?", s, a, "bipace_q") for s in THINKING for a in OURS),
    *(Question("Does ours beat GRPO?", s, a, "grpo") for s in THINKING for a in OURS),
    *(Question("Ours, once more?", CONFIRM, "bipace_eb", b) for b in ("grpo", "bipace_q")),
    *(Question("Does a step term beat GRPO?", CRAFT, a, "grpo") for a in ("gigpo", "bipace_q")),
]
MAIN = dict.fromkeys(("grpo", *STEP, "bipace_q_prompt_end"), SEEDS)
REST = ("grpo_mean", "hgpo", "bipace_diff", "pace_q", "bipace_q_shrunk", "state_q", "ngram_q")
W1 = tuple(arm for arm in ARMS if arm.endswith("_w1"))
# (engine, setting) -> seeds of each arm
SIZES: dict[tuple[str, str], dict[str, int]] = {
    ("lab", VARIED): MAIN | dict.fromkeys(OURS, SEEDS) | dict.fromkeys(REST, FEW),
    ("lab", CONFIRM): dict.fromkeys(("grpo", "bipace_q", "bipace_eb"), SEEDS),
    ("lab", REASONING): MAIN | dict.fromkeys(OURS, SEEDS) | dict.fromkeys(W1, SOME),
    ("lab", ACTION): dict.fromkeys(("grpo", *STEP), SEEDS),
    ("full", VARIED): dict.fromkeys(("grpo", *STEP), 5),
    ("full", CRAFT): dict.fromkeys(("grpo", "gigpo", "bipace_q"), 3),
}


def jobs(
    work: str, engine: str, settings: Sequence[str], arms: Sequence[str], seeds: int, changes: tuple = ()
) -> list[Job]:
    """The planned runs of `engine`, seed after seed so that an unfinished study is balanced.

    `settings` and `arms` choose among the planned ones (empty: all); `seeds` replaces their number (0: as planned);
    `changes` are those of `Job`.
    """
    out = []
    for (planned, setting), sizes in SIZES.items():
        if planned != engine or (settings and setting not in settings):
            continue
        wanted = {arm: seeds or count for arm, count in sizes.items() if not arms or arm in arms}
        for seed in range(max(wanted.values(), default=0)):
            out += [Job(work, setting, engine, arm, seed, changes) for arm, count in wanted.items() if seed < count]
    return out
