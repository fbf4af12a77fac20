"""The synchronous trainer: upstream's loop with our generator and maker, and a run folder."""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.trainer.ppo_trainer import PPOTrainer as _PPOTrainer
from openrlhf.utils.logging_utils import init_logger

from openrlhf_bipace.advantages.pipeline import Credit
from openrlhf_bipace.integration.experience import AgentExperienceMaker
from openrlhf_bipace.integration.host import undecorated
from openrlhf_bipace.integration.samples import AgentSamplesGenerator
from openrlhf_bipace.rollout.dump import write_rollouts
from openrlhf_bipace.rollout.summary import summarise
from openrlhf_bipace.runs import RunFolder, StopRequested

logger = init_logger(__name__)

# Rollout and training engines agree to about 1e-3 before the first update; corrupted weights are off by nats.
MAX_FIRST_VLLM_KL = 0.5
EPSILON_FILE = "epsilon.json"  # what --bipace.epsilon auto chose, and the curve it chose from


class AgentTrainer(undecorated(_PPOTrainer)):
    """OpenRLHF's PPO trainer for rollouts of our agent loop."""

    def __init__(
        self,
        pretrain: str,
        strategy: Any,
        actor: Any,
        critic: Any,
        reward: Any,
        reference: Any,
        engines: Any,
        **generate_kwargs: Any,
    ) -> None:
        # Upstream leaves this process unseeded, so the data come in another order every time.
        torch.manual_seed(strategy.args.train.seed)
        super().__init__(pretrain, strategy, actor, critic, reward, reference, engines, **generate_kwargs)
        self.run_folder = RunFolder(strategy.args.bipace.run_dir)
        settled = self.run_folder.read_json(EPSILON_FILE) if strategy.args.ckpt.load_enable else {}
        self.experience_maker = AgentExperienceMaker(
            actor, critic, reward, reference, self.kl_ctl, strategy, self.tokenizer, epsilon=settled.get("epsilon")
        )
        self.samples_generator = AgentSamplesGenerator(
            strategy, self.prompts_dataloader, self.eval_dataloader, self.tokenizer, engines
        )
        self._steps_done = 0

    def fit(self, global_step: int = 0) -> None:
        """Upstream's loop; with --agent.eval_at_start an evaluation of the untrained policy comes first."""
        if self.args.agent.eval_at_start and self.eval_dataloader and not self.args.ckpt.load_enable:
            self.evaluate(
                0,
                **{
                    **self.generate_kwargs,
                    "temperature": self.args.eval.temperature,
                    "n_samples_per_prompt": self.args.eval.n_samples_per_prompt,
                },
            )
        super().fit(global_step)

    def train_step(self, rollout_samples: list, global_step: int) -> tuple[dict, int]:
        """One iteration; the status also holds the agent's figures and the estimator's diagnostics."""
        status, step = super().train_step(rollout_samples, global_step)
        maker = self.experience_maker
        status.update(summarise(maker.trajectories))
        columns = {}
        if maker.credit is not None:
            columns = maker.credit.columns
            status.update(maker.credit.metrics)
            self._report(step, maker.credit)
        self._check_engines_agree(status)
        write_rollouts(self.run_folder.rollouts / f"step_{step:06d}.parquet", maker.trajectories, columns)
        return status, step

    def _report(self, step: int, credit: Credit) -> None:
        for warning in credit.warnings:
            logger.warning(f"Step {step}: {warning}")
        found = credit.calibration
        if found is not None:
            chosen = None if found.refused else found.epsilon
            scan = {"step": step, "epsilon": chosen, "r2": found.r2, "curve": found.curve}
            self.run_folder.write_json(EPSILON_FILE, scan)
            logger.info(f"--bipace.epsilon auto: {scan}")

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        """Upstream's evaluation, plus success and lengths as the environment tells them."""
        logs = super().evaluate(global_step, **generate_kwargs)
        trajectories = self.samples_generator.eval_trajectories
        figures = summarise(trajectories, "eval")
        if self.tensorboard_logger:
            self.tensorboard_logger.log_eval(global_step, {k.removeprefix("eval/"): v for k, v in figures.items()})
        if self.wandb_logger:
            self.wandb_logger.log_eval(global_step, {k.removeprefix("eval/"): v for k, v in figures.items()})
        self.run_folder.append_metrics(global_step, {**logs, **figures})
        write_rollouts(self.run_folder.rollouts / f"eval_{global_step:06d}.parquet", trajectories)
        logger.info(f"Evaluation at step {global_step}: success {figures.get('eval/success', float('nan')):.3f}")
        return logs

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict | None = None, client_states: dict | None = None
    ) -> None:
        """Upstream's, and one line of metrics.jsonl per iteration. Raises StopRequested where a stop was asked for.

        A step that stops saves its checkpoint whatever --ckpt.save_steps says; an evaluation due at it is left out.
        """
        self.run_folder.append_metrics(global_step, logs_dict or {})
        stopping = self.run_folder.stop_requested()
        if stopping:
            self.args.ckpt.save_steps = 1
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        if stopping:
            for tracker in filter(None, (self.wandb_logger, self.tensorboard_logger)):
                tracker.close()
            raise StopRequested(f"stopped after step {global_step} as {self.run_folder.path / 'stop'} asks")

    def _compute_rollout_stats(self, experiences: list) -> dict[str, float]:
        """Upstream's figures without the rollouts that failed."""
        sound = [t for t in self.experience_maker.trajectories if not t.end.failed]
        if not sound:
            first = self.experience_maker.trajectories[0]
            raise RuntimeError(f"every rollout of this iteration failed, the first with: {first.error}")
        stats = super()._compute_rollout_stats(experiences)
        mean = sum(t.reward for t in sound) / len(sound)
        variance = sum((t.reward - mean) ** 2 for t in sound) / max(len(sound) - 1, 1)
        stats["rollout/reward_mean"], stats["rollout/reward_std"] = mean, variance**0.5
        stats["rollout/num_samples"] = float(len(sound))
        return stats

    def _check_engines_agree(self, status: dict) -> None:
        self._steps_done += 1
        kl = status.get("vllm_kl")
        if self._steps_done == 1 and kl is not None and not abs(kl) <= MAX_FIRST_VLLM_KL:
            raise RuntimeError(
                f"vllm_kl is {kl:.3f} at the first step (at most {MAX_FIRST_VLLM_KL} is plausible): the rollout "
                "engine and the policy do not hold the same weights"
            )
