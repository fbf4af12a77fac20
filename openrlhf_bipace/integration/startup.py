"""Everything that can be refused before a model loads, each with one message: the flag, what was got, what is allowed.

Works on the flat namespace of upstream's parser, whose attribute names are the flags without the dashes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from openrlhf_bipace import advantages, envs
from openrlhf_bipace.config import AgentConfig, BipaceConfig
from openrlhf_bipace.integration import host
from openrlhf_bipace.runs import METRICS

# flag -> (value it must keep, why), for rollouts of our agent loop
UNSUPPORTED = {
    "ds.ring_attn_size": (1, "hidden states of a sequence split over ranks are not gathered"),
    "ds.tensor_parallel_size": (1, "hidden states of tensor parallel ranks are not gathered"),
    "ds.lora.rank": (0, "OpenRLHF sends LoRA's own weights to the engine, which knows only the merged ones"),
    "data.max_images_per_prompt": (0, "vision-language models are not supported"),
    "train.agent_func_path": (None, "--agent.env brings its own agent loop"),
    "reward.remote_url": (None, "the environment gives the reward"),
    "reward.model_name_or_path": (None, "the environment gives the reward"),
}
# flag -> (value it must keep, why), for our estimators on top
UNSUPPORTED_OURS = {
    "algo.advantage.gamma": (1, "the discount per turn is --bipace.gamma"),
    "algo.advantage.lambd": (1, "there is no critic"),
    "critic.model_name_or_path": (None, "there is no critic"),
    "reward.clip_range": ((-10, 10), "rewards of turns are never clipped"),
    "reward.overlong_buffer_len": (None, "length penalties do not know turns"),
    "reward.stop_properly_penalty_coef": (None, "length penalties do not know turns"),
    "actor.policy_loss_type": ("ppo", "GSPO has one ratio per row, and a row may hold many turns"),
    "actor.loss_agg_mode": ("token-mean", "--bipace.loss_agg says what weighs the same"),
    "algo.advantage.no_std_norm": (False, "--bipace.episode_mode says whether the std divides"),
}


def check(args: Any, bipace: BipaceConfig, agent: AgentConfig, without_cuda: bool) -> None:
    """Raise ValueError for the first thing that cannot work."""
    estimator = getattr(args, "algo.advantage.estimator")
    ours = advantages.is_ours(estimator)
    if without_cuda:
        _check_cpu(args)
    if ours and not agent.env:
        raise ValueError(
            f"{host.ESTIMATOR_FLAG}: got {estimator}, which compares the turns of an environment; "
            f"--agent.env is needed too, allowed: {', '.join(envs.names())}"
        )
    if not agent.env:
        return
    try:
        envs.env_class(agent.env)
    except ValueError as error:
        raise ValueError(f"--agent.env: {error}") from None
    try:
        envs.make(agent.env, **({"data": agent.data} if agent.data else {})).close()
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(f"--agent.env {agent.env} with --agent.data {agent.data!r}: {error}") from None
    _check_fixed(args, UNSUPPORTED, "--agent.env")
    if ours:
        advantages.check(estimator, bipace)
        _check_fixed(args, UNSUPPORTED_OURS, f"{host.ESTIMATOR_FLAG} {estimator}")
        _check_ours(args, agent, estimator)
    elif agent.context != "full":
        raise ValueError(
            f"--agent.context: got {agent.context}, allowed with {host.ESTIMATOR_FLAG} {estimator}: full (OpenRLHF's "
            "estimators know one row per trajectory; grpo is group_norm and knows turns)"
        )
    _check_engines(args)
    _check_budgets(args, agent)
    _check_run_folder(args, bipace.run_dir)
    check_writable("--ckpt.output_dir", getattr(args, "ckpt.output_dir"))
    check_writable("--ckpt.path", getattr(args, "ckpt.path"))
    _check_model(args, bipace, agent, needs_hidden=ours and advantages.needs_hidden(estimator))
    _check_tasks(args, agent)


def _check_fixed(args: Any, table: dict[str, tuple[Any, str]], cause: str) -> None:
    for flag, (allowed, why) in table.items():
        got = getattr(args, flag)
        same = list(got) == list(allowed) if isinstance(allowed, tuple) else got == allowed
        if not same:
            raise ValueError(f"--{flag}: got {got!r}, allowed with {cause}: {allowed!r} ({why})")


def _check_ours(args: Any, agent: AgentConfig, estimator: str) -> None:
    samples = getattr(args, "rollout.n_samples_per_prompt")
    if samples < 2:
        raise ValueError(
            f"--rollout.n_samples_per_prompt: got {samples}, allowed with {estimator}: 2 or more (it compares the "
            "rollouts of one prompt)"
        )
    coefficient = getattr(args, "algo.kl.init_coef")
    if coefficient > 0 and not getattr(args, "algo.kl.use_loss"):
        raise ValueError(
            f"--algo.kl.init_coef: got {coefficient} without --algo.kl.use_loss, allowed with {estimator}: KL in the "
            "loss (--algo.kl.use_loss) or none (--algo.kl.init_coef 0); a KL in the reward would be lost"
        )

    if getattr(args, "algo.advantage.is_correction_level") == "seq" and agent.context == "full":
        raise ValueError(
            f"--algo.advantage.is_correction_level: got seq, allowed with {estimator} and --agent.context full: off | "
            "token (a sequence is a whole trajectory there: one bad turn would mask every other; with --agent.context "
            "window it is one turn)"
        )


def _check_engines(args: Any) -> None:
    engines = getattr(args, "vllm.num_engines")
    if not engines:
        raise ValueError(f"--vllm.num_engines: got {engines!r}, allowed with --agent.env: 1 or more")


def _check_budgets(args: Any, agent: AgentConfig) -> None:
    longest = getattr(args, "data.max_len")
    if agent.context == "window" and agent.max_turn_tokens >= longest:
        raise ValueError(
            f"--agent.max_turn_tokens: got {agent.max_turn_tokens}, allowed with --agent.context window: less than "
            f"--data.max_len ({longest}), which holds the prompt too"
        )


def _check_cpu(args: Any) -> None:
    backend = getattr(args, "vllm.sync_backend")
    if backend != "gloo":
        raise ValueError(f"--vllm.sync_backend: got {backend!r}, allowed without CUDA: gloo")
    attention = getattr(args, "ds.attn_implementation")
    if attention not in ("sdpa", "eager"):
        raise ValueError(f"--ds.attn_implementation: got {attention!r}, allowed without CUDA: sdpa | eager")
    for flag in ("ds.packing_samples", "train.dynamic_batch_enable"):  # the second switches the first on
        if getattr(args, flag):
            raise ValueError(f"--{flag}: got True, allowed without CUDA: False (packing needs flash attention)")
    if getattr(args, "train.enable_ema"):
        raise ValueError("--train.enable_ema: got True, allowed without CUDA: False (OpenRLHF averages on the GPU)")
    ranks = getattr(args, "actor.num_nodes") * getattr(args, "actor.num_gpus_per_node")
    if getattr(args, "ds.zero_stage") == 3 and ranks > 1:
        raise ValueError(
            f"--ds.zero_stage: got 3 with {ranks} policy ranks, allowed without CUDA: 2, or 3 with one rank "
            "(ZeRO-3 over several CPU ranks was seen to corrupt weights while loading)"
        )


def check_writable(flag: str, folder: str) -> None:
    """Raise ValueError unless `folder` exists or can be made, and takes files."""
    path = Path(folder).absolute()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{flag}: got {folder!r}, allowed: a writable folder ({existing} is not)")


def _check_run_folder(args: Any, folder: str) -> None:
    check_writable("--bipace.run_dir", folder)
    if (Path(folder) / METRICS).exists() and not getattr(args, "ckpt.load_enable"):
        raise ValueError(
            f"--bipace.run_dir: got {folder!r}, which holds another run's {METRICS}, allowed: another folder, or "
            "--ckpt.load_enable to go on with that run"
        )


def _check_model(args: Any, bipace: BipaceConfig, agent: AgentConfig, needs_hidden: bool) -> None:
    from transformers import AutoConfig, AutoTokenizer

    from openrlhf_bipace.rollout.context import ChatContext

    name = getattr(args, "actor.model_name_or_path")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--actor.model_name_or_path: got {name!r}, allowed: a model folder or hub name ({reason})"
        ) from None
    try:
        ChatContext(tokenizer, grows=agent.context == "full")
    except ValueError as error:
        raise ValueError(f"--actor.model_name_or_path: got {name!r}: {error}") from None
    layers = config.get_text_config().num_hidden_layers
    if needs_hidden and not -layers <= bipace.layer <= -2:
        raise ValueError(
            f"--bipace.layer: got {bipace.layer}, allowed for {name} ({layers} decoder layers): -2 down to -{layers}"
        )


def _check_tasks(args: Any, agent: AgentConfig) -> None:
    if not getattr(args, "data.label_key"):
        raise ValueError("--data.label_key: got nothing, allowed with --agent.env: the column with the task as JSON")
    for flag, split in (("data.prompt_dataset", "data.prompt_split"), ("eval.dataset", "eval.split")):
        dataset = getattr(args, flag)
        if flag == "data.prompt_dataset" and not dataset:
            raise ValueError("--data.prompt_dataset: got nothing, allowed: a dataset of tasks")
        if dataset:
            _check_dataset(flag, dataset, getattr(args, split), args, agent)


class _QuietStrategy:
    """What upstream's dataset loader asks of a strategy."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def print(self, *message: Any) -> None:
        pass

    def is_rank_0(self) -> bool:
        return False


def _check_dataset(flag: str, dataset: str, split: str, args: Any, agent: AgentConfig) -> None:
    from openrlhf.datasets.utils import blending_datasets

    try:
        rows = blending_datasets(dataset, None, _QuietStrategy(args), dataset_split=split)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--{flag}: got {dataset!r}, allowed: a dataset that loads ({reason})") from None
    key = getattr(args, "data.label_key")
    if key not in rows.column_names:
        raise ValueError(f"--data.label_key: got {key!r}, allowed for {dataset}: {', '.join(rows.column_names)}")
    cls = envs.env_class(agent.env)
    for number, label in enumerate(rows[key], 1):
        try:
            task = json.loads(label)
            if not isinstance(task, dict):
                raise ValueError("a JSON object is needed")
            if agent.env in envs.names() and task.get("env") != agent.env:  # a file's name means nothing elsewhere
                raise ValueError(f'a JSON object with "env": "{agent.env}" is needed')
            cls.check_task(task)
        except (TypeError, ValueError) as error:
            raise ValueError(f"--{flag} {dataset}, row {number}, column {key!r}: got {label!r}: {error}") from None
