"""The drop-in: with an upstream estimator and an upstream agent, our command line does what OpenRLHF's does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.stack

# Two turns, seeded by prompt and sample: both runs sample the same tokens whatever the order of arrival. Upstream
# shuffles its data unseeded, so every iteration takes all of them.
AGENT = """
import hashlib, itertools
from collections import defaultdict
from copy import deepcopy
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    def __init__(self):
        self.counts = defaultdict(itertools.count)

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        sample = next(self.counts[prompt])
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ranges, log_probs = [], [0.0] * len(tokens)
        for turn in range(2):
            params = deepcopy(sampling_params)
            params.max_tokens = 6
            params.seed = int(hashlib.md5(f"{prompt}/{sample}/{turn}".encode()).hexdigest()[:7], 16)
            output = (await llm_engine.generate(tokens, params)).outputs[0]
            ids = list(output.token_ids)
            ranges.append((len(tokens), len(tokens) + len(ids)))
            feedback = hf_tokenizer(" look around", add_special_tokens=False)["input_ids"]
            log_probs += [entry[i].logprob for i, entry in zip(ids, output.logprobs)] + [0.0] * len(feedback)
            tokens = tokens + ids + feedback
        reward = sum(sum(tokens[s:e]) for s, e in ranges) % 7 / 7
        return {"prompt": prompt, "label": label, "images": None, "mm_train_inputs": None, "reward": reward,
                "scores": reward, "observation_tokens": tokens, "action_ranges": ranges,
                "rollout_log_probs": log_probs, "truncated": False, "extra_logs": {}}
"""


# The shape OpenRLHF documents for its users: an instance with reset and step behind its own multi-turn executor.
MULTI_TURN = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        reward = torch.tensor(float(len(states["action_text"]) % 2))
        return {"rewards": reward, "scores": reward, "environment_feedback": " go on .", "done": self.turns == 3,
                "sampling_params": states.get("sampling_params"), "extra_logs": {"turns": torch.tensor(self.turns)}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def upstream_flags(model: Path, agent: Path, prompts: Path, out: Path) -> dict[str, object]:
    """Nothing but OpenRLHF's own flags: two iterations of 4 prompts x 4 samples."""
    return {
        "actor.model_name_or_path": model,
        "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "vllm.sync_backend": "gloo",
        "vllm.enforce_eager": None,
        "ds.attn_implementation": "sdpa",
        "train.agent_func_path": agent,
        "data.prompt_dataset": prompts,
        "data.max_len": 128,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.micro_batch_size": 4,
        "train.batch_size": 16,
        "train.num_episodes": 2,
        "train.micro_batch_size": 4,
        "algo.advantage.estimator": "group_norm",
        "algo.advantage.is_correction_level": "token",
        "algo.kl.init_coef": 0.01,
        "actor.adam.lr": 1e-3,
        "actor.lr_warmup_ratio": 0,
        "ckpt.output_dir": out / "final",
        "logger.tensorboard_dir": out / "tensorboard",
    }


@pytest.fixture(scope="module")
def runs(tiny, helpers, tmp_path_factory) -> dict[str, Path]:
    """The same flags through both command lines, one seed; the folder of each."""
    base = tmp_path_factory.mktemp("dropin")
    (base / "agent.py").write_text(AGENT)
    prompts = base / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"go to room {i} ."}) + "\n" for i in range(4)))
    out = {}
    for name, module, first in (
        ("upstream", "openrlhf_bipace.integration.cpu", ["openrlhf.cli.train_ppo_ray"]),
        ("ours", "openrlhf_bipace.cli.train_ppo_ray", []),
    ):
        folder = base / name
        folder.mkdir()
        flags = upstream_flags(tiny.folder, base / "agent.py", prompts, folder)
        helpers.run_module(module, [*first, *helpers.argv(flags)], folder)
        out[name] = folder
    return out


def scalars(folder: Path) -> dict[str, list[float]]:
    """Every scalar of the run's TensorBoard log, but for times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((folder / "tensorboard").iterdir())))
    events.Reload()
    return {
        tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"] if "timing" not in tag
    }


def test_same_figures_as_openrlhf(runs):
    upstream, ours = scalars(runs["upstream"]), scalars(runs["ours"])
    assert upstream.keys() == ours.keys() and len(upstream) > 15
    for tag, values in upstream.items():
        assert len(values) == 2
        assert ours[tag] == pytest.approx(values, rel=1e-4, abs=1e-6), tag
    assert upstream["train/actor_grad_norm"][0] > 0 and upstream["train/rollout/reward_std"][0] > 0


def test_same_weights_as_openrlhf(runs, tiny):
    from safetensors.torch import load_file

    upstream, ours = (load_file(runs[name] / "final" / "model.safetensors") for name in ("upstream", "ours"))
    moved = 0.0
    for name, weight in upstream.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)
        moved = max(moved, (weight - tiny.model.state_dict()[name]).abs().max().item())
    assert moved > 1e-4


def test_a_multi_turn_agent_file_runs_unchanged(tiny, helpers, tmp_path):
    """Upstream's executor, upstream's estimator, our command line."""
    (tmp_path / "agent.py").write_text(MULTI_TURN)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"go to room {i} ."}) + "\n" for i in range(4)))
    flags = upstream_flags(tiny.folder, tmp_path / "agent.py", prompts, tmp_path) | {"train.num_episodes": 1}
    helpers.run_module("openrlhf_bipace.cli.train_ppo_ray", helpers.argv(flags), tmp_path)
    figures = scalars(tmp_path)
    # Upstream gives a turn the whole rest of the context, so that few trajectories get to their third.
    assert 1 <= figures["train/turns"][0] <= 3 and len(figures["train/actor_grad_norm"]) == 1
