"""The samples generator: upstream's, with group identities and seeds set by the driver and trajectories kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from openrlhf_bipace.records import Trajectory

TRAJECTORY = "_trajectory"  # key of `Experience.info`: a list with one Trajectory per row, survives concat and split


def pop_trajectories(experience: Experience) -> list[Trajectory]:
    """Take the trajectories out of `experience`: upstream turns every list left in `info` into a float tensor."""
    return experience.info.pop(TRAJECTORY)


class PromptCursor:
    """The prompt loader, whose state also holds what else decides the coming samples: seeds and unused samples."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.generator: AgentSamplesGenerator | None = None

    def __iter__(self) -> Iterator:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: upstream stores it as its loader's state."""
        return {"loader": self.loader.state_dict(), "samples": self.generator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.loader.load_state_dict(state["loader"])
        self.generator.load_state_dict(state["samples"])


class _Samples(list):
    """Unused samples in a checkpoint's state, which upstream prints in full."""

    def __repr__(self) -> str:
        return f"<{len(self)} unused samples>"


class AgentSamplesGenerator(SamplesGenerator):
    """Labels every prompt it dispatches with a group id and a seed, so that groups never depend on arrival order."""

    def __init__(self, strategy: Any, prompts_dataloader: PromptCursor, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, prompts_dataloader, *args, **kwargs)
        self._dispatched = {"train": 0, "eval": 0}
        self._phase = "train"
        self.eval_trajectories: list[Trajectory] = []  # of the latest evaluation, in the order of the data
        self._sample_buffer: list[Experience] = []
        self._dataloader_iter: Iterator | None = None
        prompts_dataloader.generator = self

    def state_dict(self) -> dict[str, Any]:
        """What decides the coming samples besides the data order: the count behind ids and seeds, unused samples."""
        return {"dispatched": self._dispatched["train"], "unused": _Samples(self._sample_buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; the loader must have its state already."""
        self._dispatched["train"], self._sample_buffer = state["dispatched"], list(state["unused"])
        if self._sample_buffer:  # upstream opens the loader only when it has no samples left
            self._dataloader_iter = iter(self.prompts_dataloader)

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """Upstream's; every evaluation uses the same seeds, in the order of the data."""
        self._phase, self._dispatched["eval"] = "eval", 0
        try:
            experiences = super().generate_eval_samples(**generate_kwargs)
        finally:
            self._phase = "train"
        self.eval_trajectories = [t for experience in experiences for t in pop_trajectories(experience)]
        return experiences

    def _generate_vllm(self, *args: Any, **kwargs: Any) -> tuple[list[Experience], int, bool]:
        """Upstream's, in the order of dispatch instead of arrival, so that a seeded run repeats itself."""
        experiences, consumed, exhausted = super()._generate_vllm(*args, **kwargs)
        experiences.sort(key=lambda e: _dispatch_order(e.info[TRAJECTORY][0]))
        return experiences, consumed, exhausted

    def _dispatch_prompts_to_vllm(self, prompts: list, labels: list, **kwargs: Any) -> list:
        return super()._dispatch_prompts_to_vllm(prompts, [self._envelope(label) for label in labels], **kwargs)

    def _envelope(self, label: str) -> str:
        count = self._dispatched[self._phase]
        self._dispatched[self._phase] += 1
        group = f"{self._phase}-{count}"
        seed = [self.args.train.seed, group]
        return json.dumps({"task": json.loads(label), "group": group, "seed": seed})

    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> Experience:
        if response["rollout_log_probs"] is None and self.args.algo.advantage.is_correction_level != "off":
            response["rollout_log_probs"] = [0.0] * len(response["observation_tokens"])
        experience = super()._process_response_into_experience(response, **kwargs)
        # Upstream counts from the first to the last action token, observations in between included.
        experience.response_length = torch.tensor([int(experience.action_mask.sum())])
        experience.info[TRAJECTORY] = [response["trajectory"]]
        return experience


def _dispatch_order(trajectory: Trajectory) -> tuple[int, int]:
    return int(trajectory.group.rpartition("-")[2]), trajectory.sample
