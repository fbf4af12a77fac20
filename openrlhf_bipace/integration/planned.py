"""Training by a plan: micro-batches as the driver composed them, optimizer steps where it says.

Upstream's replay buffer reshuffles rows and needs their number to divide evenly; its dynamic batching does not set
DeepSpeed's accumulation boundary, so that under ZeRO-2 only an optimizer step's last micro-batch would count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

PLAN = "_plan"  # key of `Experience.info`: the micro-batch's Place, once per row


@dataclass(slots=True, frozen=True)
class Place:
    """Where a micro-batch stands in the plan."""

    last: bool  # its optimizer step ends with it
    tokens: float  # response tokens of that step, over all ranks
    rows: float  # rows with response tokens of that step, over all ranks
    share: float  # of the rank's rows in that step that are in this micro-batch


class PlannedBuffer(NaiveReplayBuffer):
    """Keeps micro-batches whole and in order, and tells upstream's dynamic-batch loop where the steps end."""

    def append(self, experience: Experience) -> None:
        """Store one micro-batch; its `info[PLAN]` says where it belongs."""
        place = experience.info.pop(PLAN)[0]
        self.items.append(experience)
        self.dynamic_indices.append([len(self.items) - 1])
        self.dynamic_optimizer_step.append(int(place.last))
        self.dynamic_batch_num_tokens.append(place.tokens)
        self.dynamic_global_batch_size.append(place.rows)
        self.dynamic_sample_loss_scale.append(place.share)

    def setup_dynamic_batch(self, strategy: Any) -> None:
        """Nothing is left to plan; upstream asks for one element at a time."""
        self.sample_batch_size = 1

    def collate_fn(self, batch: list[list[Experience]]) -> Experience:
        """The micro-batch itself, as a copy: training adds to `info` and moves tensors to the device."""
        experience = batch[0][0]
        return replace(experience, info=dict(experience.info))

    def clear(self) -> None:
        """Forget every micro-batch and its place."""
        for entries in (
            self.items,
            self.dynamic_indices,
            self.dynamic_optimizer_step,
            self.dynamic_batch_num_tokens,
            self.dynamic_global_batch_size,
            self.dynamic_sample_loss_scale,
        ):
            entries.clear()


class PlannedTrainer(ActorPPOTrainer):
    """Upstream's PPO loop over a `PlannedBuffer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        buffer = self.replay_buffer
        self.replay_buffer = PlannedBuffer(
            buffer.sample_batch_size, buffer.limit, buffer.cpu_offload, buffer.packing_samples, dynamic_batch=True
        )

    def training_step(
        self, experience: Experience, kl_ctl: float, step: int, loss_batch_info: dict | None = None
    ) -> dict[str, Any]:
        """Upstream's; DeepSpeed hears whether the micro-batch ends its step, and padding rows stay out of the logs."""
        ends = bool(self.replay_buffer.dynamic_optimizer_step[step])
        self.actor.model.set_gradient_accumulation_boundary(ends)
        status = super().training_step(experience, kl_ctl, step, loss_batch_info)
        real = experience.action_mask.any(-1)
        status["num_samples"] = float(real.sum())
        for name, weight in status["weights"].items():
            if weight == "sample":
                values = status["metrics"][name][real.to(status["metrics"][name].device)].float()
                status["metrics"][name] = values.mean() if len(values) else torch.zeros(())
        return status
