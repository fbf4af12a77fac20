"""The lab's trainer: one process, plain PyTorch, the trainer's own rollouts, credit pipeline and loss.

From the same trajectories and weights it gives the gradient that the full stack gives (a test), without Ray, vLLM and
DeepSpeed, for models that fit a CPU core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages.pipeline import Credit, CreditPipeline
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.lab.warmstart import padded
from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout.rows import Row, hidden_positions, locate, training_rows

MAX_NORM = 1.0  # of the gradient, as OpenRLHF's default
BETAS = (0.9, 0.95)  # of Adam, likewise


@dataclass(slots=True)
class Batch:
    """Training rows of one iteration, padded on the right: causal attention needs no mask."""

    owners: list[int]  # trajectory of each row
    rows: list[Row]
    ids: torch.Tensor  # [rows, T]
    response: torch.Tensor  # [rows, T - 1] bool, column t predicts token t + 1

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Batch:
        """The rows of every trajectory that counts."""
        owners, rows = training_rows(trajectories)
        ids, response = padded(rows)
        return cls(owners, rows, ids, response[:, 1:])


class Learner:
    """Updates a policy by one estimator: one optimizer step per iteration over all its trajectories.

    Args:
        model: a causal language model of transformers, changed in place.
        estimator: a name of `advantages.names()`.
        config: every option of the estimator.
        lr: of Adam, constant.
    """

    def __init__(self, model: Any, estimator: str, config: BipaceConfig, lr: float) -> None:
        self.model, self.config = model, config
        self.pipeline = CreditPipeline(estimator, config)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=0.0)

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One optimizer step; the estimator's diagnostics, the gradient's norm and the sampled entropy in nats."""
        self.optimizer.zero_grad()
        loss, credit, entropy = self.loss(trajectories)
        loss.backward()
        return credit.metrics | {"health/entropy": entropy, "health/grad_norm": self.step()}

    def step(self) -> float:
        """Clip the gradients and move the weights. Returns the gradients' norm before the clip."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return float(norm)

    def loss(self, trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, Credit, float]:
        """Policy loss with its graph, the credit behind it, and the sampled entropy.

        The rollouts are the present policy's own, so PPO's ratio is 1 and its clip does nothing: the gradient is that
        of -(advantage x log-probability), averaged as `--bipace.loss_agg` says.
        """
        batch = Batch.of(trajectories)
        out = self.model.model(batch.ids, use_cache=False, output_hidden_states=True)
        credit = self.pipeline.run(trajectories, self._phi(trajectories, batch, out.hidden_states))
        logits = self.model.lm_head(out.last_hidden_state[:, :-1][batch.response]).float()
        logp = logits.log_softmax(-1).gather(1, batch.ids[:, 1:][batch.response][:, None])[:, 0]
        ratio = (logp - logp.detach()).exp()
        loss = -(self._per_token(batch, credit)[batch.response] * ratio).sum() / len(logp)
        return loss, credit, -float(logp.detach().mean())

    def _phi(self, trajectories: Sequence[Trajectory], batch: Batch, hidden: Sequence[torch.Tensor]) -> Any:
        """[turns, d], trajectory after trajectory, or None where the estimator reads no hidden states."""
        if not advantages.needs_hidden(self.pipeline.estimator):
            return None
        layer = hidden[self.config.layer].detach()
        pairs = [
            (i, column)
            for i, (owner, row) in enumerate(zip(batch.owners, batch.rows, strict=True))
            for column in hidden_positions(row, trajectories[owner], self.config.position)
        ]
        rows, columns = zip(*pairs, strict=True)
        return layer[list(rows), list(columns)]

    def _per_token(self, batch: Batch, credit: Credit) -> torch.Tensor:
        """[rows, T - 1] advantage times loss weight of every response token."""
        row, start, end = map(torch.tensor, locate(batch.rows, batch.owners, credit.sources))
        owner = torch.tensor(batch.owners)[row]
        weights = advantages.loss_weights(self.config.loss_agg, torch.zeros_like(row), owner, end - start)
        return advantages.to_tokens(credit.values * weights, row, start, end, *batch.ids.shape)
