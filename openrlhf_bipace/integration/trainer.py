"""The synchronous trainer, and what it shares with the asynchronous one: our generator and maker, a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from openrlhf.trainer.ppo_trainer import PPOTrainer as _PPOTrainer
from openrlhf.utils.logging_utils import init_logger

from openrlhf_bipace import advantages
from openrlhf_bipace.integration.experience import AgentExperienceMaker, StepExperienceMaker
from openrlhf_bipace.integration.host import undecorated
from openrlhf_bipace.integration.samples import AgentSamplesGenerator, PromptCursor
from openrlhf_bipace.records import Trajectory
from openrlhf_bipace.rollout import health
from openrlhf_bipace.rollout.dump import write_rollouts
from openrlhf_bipace.rollout.summary import summarise
from openrlhf_bipace.runs import RunFolder, StopRequested

logger = init_logger(__name__)

# Rollout and training engines agree to about 1e-3 before the first update; corrupted weights are off by nats.
MAX_FIRST_VLLM_KL = 0.5
EPSILON_FILE = "epsilon.json"  # what --bipace.epsilon auto chose, and the curve it chose from
BEGINNING = {"episode": 0, "global_step": 0, "total_consumed_prompts": 0, "data_loader_state_dict": {}}
STATE = "bipace"  # key of our part of a checkpoint's state


class AgentTraining:
    """What our trainers add to upstream's training side; a mixin, to stand before an upstream class."""

    def set_up(self) -> None:
        """After upstream's constructor: our maker and the run folder."""
        groups = (self.actor_model_group, self.critic_model_group, self.reward_model_group, self.reference_model_group)
        ours = advantages.is_ours(self.args.algo.advantage.estimator)
        maker = StepExperienceMaker if ours else AgentExperienceMaker
        self.experience_maker = maker(*groups, self.kl_ctl, self.strategy, self.tokenizer)
        self.run_folder = RunFolder(self.args.bipace.run_dir)
        self._steps_done = self._syncs = 0  # of this process
        if ours:
            self.args.train.dynamic_batch_enable = False  # upstream would distribute anew what the maker has placed

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Upstream's, and with --ckpt.load_enable our own part of the checkpoint and the run folder as it was then."""
        # Upstream has nothing to say where a run was killed while it wrote its first checkpoint.
        states = BEGINNING | super().init_checkpoint_states()
        if self.args.ckpt.load_enable:
            if not states["global_step"]:
                logger.warning(f"--ckpt.load_enable: no checkpoint in {self.args.ckpt.path}; the run starts anew")
            self.run_folder.rewind(states["global_step"])
            self._restore(states.get(STATE, {}))
        return states

    def _restore(self, state: dict[str, Any]) -> None:
        if "kl_coefficient" in state:
            self.kl_ctl.value = state["kl_coefficient"]
        if "estimator" in state:
            self.experience_maker.pipeline.restore(state["estimator"])
        if "batches" in state:
            self.experience_maker.batches = state["batches"]

    def _own_state(self) -> dict[str, Any]:
        state = {"kl_coefficient": self.kl_ctl.value}
        if isinstance(self.experience_maker, StepExperienceMaker):
            state |= {"estimator": self.experience_maker.pipeline.state(), "batches": self.experience_maker.batches}
        return state

    def train_step(self, rollout_samples: list, global_step: int) -> tuple[dict, int]:
        """One iteration; the status also holds the agent's figures, the estimator's diagnostics and the health's."""
        syncs = self._syncs
        status, step = super().train_step(rollout_samples, global_step)
        maker = self.experience_maker
        status.update(summarise(maker.trajectories))
        status.update(health.staleness(maker.trajectories, syncs))
        columns = {}
        if maker.credit is not None:
            columns = maker.credit.columns
            status.update(maker.credit.metrics)
        status.update(health.examine(maker.trajectories, status))
        self._report(step, status)
        self._check_engines_agree(status)
        write_rollouts(self.run_folder.rollouts / f"step_{step:06d}.parquet", maker.trajectories, columns)
        return status, step

    def _report(self, step: int, status: dict[str, Any]) -> None:
        credit = self.experience_maker.credit
        for warning in [*(credit.warnings if credit else []), *health.alarms(status)]:
            logger.warning(f"Step {step}: {warning}")
        if status.get("agent/staleness_max"):
            logger.info(
                f"Step {step}: sampled {status['agent/staleness_mean']:.1f} weight updates ago on average, at most "
                f"{status['agent/staleness_max']:.0f}"
            )
        found = credit.calibration if credit else None
        if found is not None:
            chosen = None if found.refused else found.epsilon
            scan = {"step": step, "epsilon": chosen, "settled": found.settled, "r2": found.r2, "curve": found.curve}
            self.run_folder.write_json(EPSILON_FILE, scan)
            logger.info(f"--bipace.epsilon auto: {scan}")

    def broadcast_to_vllm(self) -> None:
        """Upstream's; counted, as the engines count what they receive."""
        super().broadcast_to_vllm()
        self._syncs += 1

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict | None = None, client_states: dict | None = None
    ) -> None:
        """Upstream's, with our state in the checkpoint and one line of metrics.jsonl per iteration.

        Where a stop was asked for the step saves a checkpoint whatever --ckpt.save_steps says, and raises
        StopRequested; an evaluation due at it is left out.
        """
        stopping = self.run_folder.stop_requested()
        if stopping:
            self.args.ckpt.save_steps = 1
        self.run_folder.append_metrics(global_step, logs_dict or {})
        client_states = {} if client_states is None else client_states
        client_states[STATE] = self._own_state()  # in place: upstream hands the same dict to save_best_checkpoint
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        if stopping:
            for tracker in filter(None, (self.tensorboard_logger, self.wandb_logger)):
                tracker.close()
            raise StopRequested(f"stopped after step {global_step} as {self.run_folder.path / 'stop'} asks")

    def _compute_rollout_stats(self, experiences: list) -> dict[str, float]:
        """Upstream's figures per trajectory, whatever the number of rows, without the rollouts that do not count."""
        sound = [t for t in self.experience_maker.trajectories if t.counts]
        rewards = torch.tensor([t.reward for t in sound])
        lengths = [sum(len(step.response_ids) for step in t.steps) for t in sound]
        cut = [t.end.truncated or any(s.finish_reason == "length" for s in t.steps) for t in sound]
        return {
            "rollout/reward_mean": float(rewards.mean()),
            "rollout/reward_std": float(rewards.std()) if len(sound) > 1 else 0.0,
            "rollout/response_length_mean": sum(lengths) / len(sound),
            "rollout/truncated_rate": sum(cut) / len(sound),
            "rollout/num_samples": float(len(sound)),
        }

    def _check_engines_agree(self, status: dict) -> None:
        self._steps_done += 1
        kl = status.get("vllm_kl")
        # Stale rollouts differ for a good reason.
        if self._steps_done > 1 or kl is None or status.get("agent/staleness_max"):
            return
        if not abs(kl) <= MAX_FIRST_VLLM_KL:
            raise RuntimeError(
                f"vllm_kl is {kl:.3f} at the first step (at most {MAX_FIRST_VLLM_KL} is plausible): the rollout "
                "engine and the policy do not hold the same weights"
            )


def resumes(args: Any) -> bool:
    """There is a checkpoint to go on from, and it is asked for."""
    return args.ckpt.load_enable and (Path(args.ckpt.path) / "_actor" / "latest").exists()


def record_evaluation(
    run_folder: RunFolder, trajectories: list[Trajectory], step: int, logs: dict
) -> dict[str, float]:
    """Success and lengths as the environment tells them, on disk with `logs` and the rollouts; returns the figures."""
    figures = summarise(trajectories, "eval")
    run_folder.append_metrics(step, {**logs, **figures})
    write_rollouts(run_folder.rollouts / f"eval_{step:06d}.parquet", trajectories)
    logger.info(f"Evaluation at step {step}: success {figures.get('eval/success', float('nan')):.3f}")
    return {name.removeprefix("eval/"): value for name, value in figures.items()}


def agent_generator(owner: Any, engines: Any, tokenizer: Any) -> AgentSamplesGenerator:
    """Our generator over the data of `owner`, whose loader becomes a `PromptCursor`."""
    owner.prompts_dataloader = PromptCursor(owner.prompts_dataloader)
    return AgentSamplesGenerator(
        owner.strategy, owner.prompts_dataloader, owner.eval_dataloader, tokenizer, vllm_engines=engines
    )


class AgentTrainer(AgentTraining, undecorated(_PPOTrainer)):
    """OpenRLHF's synchronous PPO trainer for rollouts of our agent loop."""

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **generate_kwargs: Any) -> None:
        torch.manual_seed(strategy.args.train.seed)  # upstream leaves this process, and so the data order, unseeded
        super().__init__(pretrain, strategy, *args, **generate_kwargs)
        self.set_up()
        self.samples_generator = agent_generator(self, self.vllm_engines, self.tokenizer)

    def fit(self, global_step: int = 0) -> None:
        """Upstream's loop; with --agent.eval_at_start an evaluation of the untrained policy comes first."""
        if self.args.agent.eval_at_start and self.eval_dataloader and not resumes(self.args):
            self.evaluate(
                0,
                **{
                    **self.generate_kwargs,
                    "temperature": self.args.eval.temperature,
                    "n_samples_per_prompt": self.args.eval.n_samples_per_prompt,
                },
            )
        super().fit(global_step)

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        """Upstream's evaluation, plus success and lengths as the environment tells them."""
        logs = super().evaluate(global_step, **generate_kwargs)
        figures = record_evaluation(self.run_folder, self.samples_generator.eval_trajectories, global_step, logs)
        for tracker in filter(None, (self.tensorboard_logger, self.wandb_logger)):
            tracker.log_eval(global_step, figures)
        return logs
