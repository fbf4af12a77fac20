"""The policy actor: upstream's, plus hidden states from the forward that scores the old log-probabilities."""

from __future__ import annotations

import time
from typing import Any

import torch
from openrlhf.trainer.ray import launcher, ppo_actor

from openrlhf_bipace import advantages
from openrlhf_bipace.integration.cluster_worker import HiddenRefs, publish
from openrlhf_bipace.integration.hidden import Positions, capture
from openrlhf_bipace.integration.host import undecorated, unwrap
from openrlhf_bipace.integration.planned import PlannedTrainer
from openrlhf_bipace.integration.ports import QuietPort
from openrlhf_bipace.integration.weights import verify_loaded_weights


class ReferenceActor(QuietPort, undecorated(launcher.ReferenceModelActor)):
    """OpenRLHF's reference actor."""


class PolicyActor(QuietPort, undecorated(ppo_actor.PolicyModelActor)):
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
        owners: list[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Log-probabilities as upstream computes them; with `positions` a pair (log-probabilities, HiddenStates).

        With `owners`, the clustering worker of each row, the vectors stay here in the object store: the pair's second
        is `HiddenRefs`.
        """
        if positions is None:
            return super().forward(sequences, action_mask, attention_mask, **kwargs)
        layer = self.strategy.args.bipace.layer
        with capture(unwrap(self.actor), layer, positions, attention_mask) as hidden:
            logprobs = super().forward(sequences, action_mask, attention_mask, **kwargs)
        states = hidden()
        if owners is None:
            return logprobs, states
        start = time.perf_counter()
        refs = publish(states.vectors, owners)
        return logprobs, HiddenRefs(refs, states.seconds + time.perf_counter() - start)
