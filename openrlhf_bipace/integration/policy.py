"""The policy actor: upstream's, plus hidden states from the forward that scores the old log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from openrlhf.trainer.ray import ppo_actor

from openrlhf_bipace import advantages
from openrlhf_bipace.integration.host import decoder_layers, undecorated, unwrap
from openrlhf_bipace.integration.planned import PlannedTrainer
from openrlhf_bipace.integration.weights import verify_loaded_weights

Positions = list[list[int]]  # per row of a micro-batch: token indices to read


class HiddenStates:
    """What one forward returned besides log-probabilities."""

    def __init__(self, vectors: list[torch.Tensor], seconds: float) -> None:
        self.vectors = vectors  # per row: [turns of the row, d] float32, length 1
        self.seconds = seconds  # time the hook took


def gather_rows(hidden: torch.Tensor, positions: Positions, attention_mask: torch.Tensor) -> torch.Tensor:
    """Vectors at `positions`.

    Args:
        hidden: [rows, T, d] of a padded batch, or [1, tokens, d] of a packed one.
        positions: per row, indices into the padded sequence.
        attention_mask: [rows, T].

    Returns:
        [sum of turns, d] in row order.
    """
    rows = torch.tensor([i for i, row in enumerate(positions) for _ in row], device=hidden.device, dtype=torch.long)
    columns = torch.tensor([t for row in positions for t in row], device=hidden.device, dtype=torch.long)
    if hidden.shape[:2] == attention_mask.shape:
        return hidden[rows, columns]
    packed = attention_mask.to(hidden.device).flatten().cumsum(0)[rows * attention_mask.shape[1] + columns] - 1
    return hidden[0, packed]


@contextmanager
def capture(model: Any, layer: int, positions: Positions, attention_mask: torch.Tensor) -> Iterator[Callable]:
    """Read ``hidden_states[layer]`` of `model` at `positions` during the forward that runs inside the block.

    Yields a function that returns `HiddenStates` once the forward has run. Only the wanted positions leave the hook,
    so memory grows by turns x d.
    """
    taken: list[torch.Tensor] = []
    seconds = 0.0

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        nonlocal seconds
        start = time.perf_counter()
        hidden = output[0] if isinstance(output, tuple) else output
        taken.append(gather_rows(hidden, positions, attention_mask).float().cpu())
        seconds += time.perf_counter() - start

    handle = decoder_layers(model)[layer].register_forward_hook(hook)
    try:
        yield lambda: HiddenStates(list(taken[0].split([len(row) for row in positions])), seconds)
    finally:
        handle.remove()


class PolicyActor(undecorated(ppo_actor.PolicyModelActor)):
    """OpenRLHF's policy actor; `forward` also returns hidden states when it is given positions."""

    def init_model_from_pretrained(self, strategy: Any, pretrain: str, *args: Any, **kwargs: Any) -> None:
        """Upstream's; the loaded weights are compared with the files before a checkpoint or update changes them.

        With our estimators the training loop is `PlannedTrainer`'s, which needs what upstream calls dynamic batching;
        the strategy is this actor's own copy.
        """
        if advantages.is_ours(strategy.args.algo.advantage.estimator):
            strategy.args.train.dynamic_batch_enable = strategy.use_dynamic_batch = True
            ppo_actor.ActorPPOTrainer = PlannedTrainer
        if strategy.args.bipace.verify_weights:
            prepare = strategy.prepare

            def prepare_and_verify(*models: Any) -> Any:
                prepared = prepare(*models)
                if isinstance(models[0], tuple):  # the policy itself; an EMA copy is prepared alone
                    verify_loaded_weights(unwrap(prepared[0]), pretrain, strategy.args.ds.zero_stage)
                return prepared

            strategy.prepare = prepare_and_verify
        try:
            super().init_model_from_pretrained(strategy, pretrain, *args, **kwargs)
        finally:
            strategy.__dict__.pop("prepare", None)

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        positions: Positions | None = None,
        **kwargs: Any,
    ) -> Any:
        """Log-probabilities as upstream computes them; with `positions` a pair (log-probabilities, HiddenStates)."""
        if positions is None:
            return super().forward(sequences, action_mask, attention_mask, **kwargs)
        layer = self.strategy.args.bipace.layer
        with capture(unwrap(self.actor), layer, positions, attention_mask) as hidden:
            logprobs = super().forward(sequences, action_mask, attention_mask, **kwargs)
        return logprobs, hidden()
