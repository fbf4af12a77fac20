"""Asynchronous training: the policy trains on one batch while the engines sample the next."""

from __future__ import annotations

from typing import Any

import ray
import torch
from openrlhf.trainer import ppo_trainer_async as upstream

from openrlhf_bipace.integration.host import undecorated
from openrlhf_bipace.integration.trainer import AgentTraining, agent_generator, record_evaluation, resumes
from openrlhf_bipace.runs import RunFolder


class AgentGenerating(undecorated(upstream.GenerateSamplesActor)):
    """Upstream's generating side of asynchronous training, with our generator."""

    def __init__(self, pretrain: str, strategy: Any, vllm_engines: Any, **kwargs: Any) -> None:
        torch.manual_seed(strategy.args.train.seed)
        super().__init__(pretrain, strategy, vllm_engines, **kwargs)
        self.strategy = strategy
        self.samples_generator = agent_generator(self, vllm_engines, self.samples_generator.tokenizer)

    def evaluate_first(self) -> None:
        """An evaluation of the untrained policy."""
        self._last_eval_step = 0
        self._run_eval()

    def _run_eval(self) -> dict[str, float]:
        """Upstream's, plus success and lengths as the environment tells them."""
        logs = super()._run_eval()
        trajectories = self.samples_generator.eval_trajectories
        figures = record_evaluation(RunFolder(self.args.bipace.run_dir), trajectories, self._last_eval_step, logs)
        return {**logs, **figures}


class AgentTrainingActor(AgentTraining, undecorated(upstream.TrainingActor)):
    """Upstream's training side of asynchronous training, with our maker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_up()


class AsyncAgentTrainer(undecorated(upstream.PPOTrainerAsync)):
    """OpenRLHF's asynchronous trainer for rollouts of our agent loop."""

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        self.args = strategy.args
        # Upstream creates both sides in this process, by these names.
        upstream.GenerateSamplesActor = ray.remote(AgentGenerating)
        upstream.TrainingActor = ray.remote(AgentTrainingActor)
        super().__init__(pretrain, strategy, *args, **kwargs)

    def fit(self) -> None:
        """Upstream's loop; with --agent.eval_at_start an evaluation of the untrained policy comes first."""
        args = self.args
        if args.agent.eval_at_start and args.eval.dataset and not resumes(args):
            ray.get(self.generator_actor.evaluate_first.remote())
        super().fit()
