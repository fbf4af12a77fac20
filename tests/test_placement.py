"""Layouts and memory: hand arithmetic, and refusals that name what is missing."""

from __future__ import annotations

import pytest

from openrlhf_bipace.launch.memory import Estimate, ModelShape, Training, estimate, shortfalls
from openrlhf_bipace.launch.placement import Layout, check_batches

FLAGS = {
    **{f"{m}.num_nodes": 1 for m in ("actor", "ref", "critic", "reward")},
    **{f"{m}.num_gpus_per_node": 2 for m in ("actor", "ref", "critic", "reward")},
    "algo.kl.init_coef": 0.01,
    "algo.advantage.estimator": "bipace_q",
    "reward.remote_url": "agent",
    "train.agent_func_path": None,
    "vllm.num_engines": 2,
    "vllm.tensor_parallel_size": 1,
    "vllm.gpu_memory_utilization": 0.5,
    "vllm.enable_sleep": False,
    "train.colocate_all": False,
    "train.async_enable": False,
    "train.colocate_actor_ref": False,
    "train.colocate_critic_reward": False,
    "train.micro_batch_size": 1,
    "train.batch_size": 8,
    "rollout.batch_size": 2,
    "rollout.n_samples_per_prompt": 4,
    "rollout.micro_batch_size": 1,
    "ds.zero_stage": 2,
    "ds.adam_offload": False,
    "ds.enable_sleep": False,
    "ds.grad_accum_dtype": None,
    "ref.offload": False,
    "data.max_len": 1024,
    "actor.gradient_checkpointing_enable": True,
}
# 2**30 parameters: a byte per parameter is a GiB. KV cache: 2 * 4 * 2 * 64 * 2 = 2,048 bytes per token.
SHAPE = ModelShape(parameters=2**30, layers=4, hidden=256, kv_heads=2, head_dim=64, vocabulary=1000)
SHARED = {"train.colocate_all": True, "vllm.enable_sleep": True, "ds.enable_sleep": True, "ds.zero_stage": 3}


def layout(**changes) -> Layout:
    return Layout.from_flags(FLAGS | {k.replace("__", "."): v for k, v in changes.items()})


def test_separate_groups_in_upstreams_order():
    slots = layout().place(nodes=2, gpus_per_node=4)
    assert [(s.node, s.gpu, *s.actors) for s in slots] == [
        (0, 0, "engine 0"), (0, 1, "engine 1"), (0, 2, "actor 0"), (0, 3, "actor 1"), (1, 0, "ref 0"), (1, 1, "ref 1"),
    ]  # fmt: skip


def test_everything_on_the_same_gpus():
    slots = layout(train__colocate_all=True).place(nodes=1, gpus_per_node=2)
    assert [s.actors for s in slots] == [("actor 0", "ref 0", "engine 0"), ("actor 1", "ref 1", "engine 1")]


def test_an_engine_over_two_gpus():
    slots = layout(train__colocate_all=True, vllm__num_engines=1, vllm__tensor_parallel_size=2).place(1, 2)
    assert [s.actors[-1] for s in slots] == ["engine 0", "engine 0"]


def test_only_actor_and_reference_share():
    slots = layout(train__colocate_actor_ref=True).place(1, 4)
    assert [s.actors for s in slots] == [("actor 0", "ref 0"), ("actor 1", "ref 1"), ("engine 0",), ("engine 1",)]


def test_asynchronous_training_gives_the_engines_their_own_gpus():
    assert layout(train__colocate_all=True, train__async_enable=True).gpus == 4


def test_upstreams_critic_and_reward_models_are_counted():
    """With gae and reward models: engines 2, actor 2, ref 2, critic and reward 2 shared or 2 + 2."""
    host = {"algo__advantage__estimator": "gae", "reward__remote_url": None}
    assert layout(**host).gpus == 10
    assert layout(**host, train__colocate_critic_reward=True).gpus == 8
    assert layout(**host, train__colocate_all=True).gpus == 2
    assert layout(**host, train__colocate_all=True, train__colocate_critic_reward=True).gpus == 4


def test_no_reference_without_kl():
    assert layout(algo__kl__init_coef=0).gpus == 4


def test_too_few_gpus_names_asked_and_available():
    with pytest.raises(
        ValueError, match=r"ask for 6 GPUs: 2 \(engine\) \+ 2 \(actor\) \+ 2 \(ref\); there are 4 .*2 too few"
    ):
        layout().place(nodes=1, gpus_per_node=4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train__colocate_all": True, "vllm__num_engines": 3}, "--vllm.num_engines: got 3 engines of 1 GPUs"),
        ({"train__colocate_all": True, "ref__num_nodes": 2}, "--ref.num_nodes, --ref.num_gpus_per_node: got 4 GPUs"),
        (
            {
                "algo__advantage__estimator": "gae",
                "reward__remote_url": None,
                "reward__num_nodes": 2,
                "train__colocate_critic_reward": True,
            },
            "--reward.num_nodes, --reward.num_gpus_per_node: got 4 GPUs",
        ),
    ],
)
def test_layouts_that_upstream_asserts_against(changes, message):
    with pytest.raises(ValueError, match=message):
        layout(**changes).place(8, 8)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rollout.micro_batch_size": 8}, "--rollout.batch_size: got 2, 8 rollouts .* too few for 2 policy ranks"),
        ({"train.batch_size": 7}, "--train.batch_size: got 7, allowed: a multiple of 2"),
    ],
)
def test_batches_that_do_not_divide(changes, message):
    check_batches(FLAGS, pads=False)
    with pytest.raises(ValueError, match=message):
        check_batches(FLAGS | changes, pads=False)


def test_our_batches_are_padded():
    check_batches(FLAGS | {"train.batch_size": 7}, pads=True)


def memory(members: str, gpu_gib: float = 80, **changes) -> Estimate:
    flags = FLAGS | {k.replace("__", "."): v for k, v in changes.items()}
    return estimate(frozenset(members.split()), SHAPE, Training.from_flags(flags), gpu_gib)


@pytest.mark.parametrize(
    "stage, weights, gradients, optimizer",
    [(0, 2, 2, 12), (1, 2, 2, 6), (2, 2, 1, 6), (3, 1, 1, 6)],
)
def test_zero_stages_on_two_ranks(stage, weights, gradients, optimizer):
    e = memory("actor", ds__zero_stage=stage)
    assert (e.weights, e.gradients, e.optimizer) == (weights, gradients, optimizer)
    assert e.training == weights + gradients + optimizer and e.generation == 0


def test_offloading():
    assert memory("actor", ds__adam_offload=True).optimizer == 0
    assert memory("ref").reference == 2 and memory("ref", ref__offload=True).reference == 0


def test_the_engines_cache():
    """0.5 x 12 GiB, less 2 GiB of weights and 1 GiB for the engine itself: 3 GiB at 2,048 bytes per token."""
    e = memory("engine", gpu_gib=12)
    assert e.engine == 6 and e.kv_tokens == 3 * 2**30 // 2048
    halved = memory("engine", gpu_gib=12, vllm__tensor_parallel_size=2)
    assert halved.kv_tokens == 4 * 2**30 // 1024


def test_phases_of_a_shared_gpu():
    """ZeRO-3, two ranks: policy 1 + 1 + 6, reference 1, engine 6 of 12. Asleep, the policy leaves only its weights."""
    both = memory("actor ref engine", 12, **{k.replace(".", "__"): v for k, v in SHARED.items()})
    assert (both.training, both.generation, both.needs) == (9, 8, 9)
    awake = {k.replace(".", "__"): v for k, v in SHARED.items()}
    awake |= {"vllm__enable_sleep": False, "ds__enable_sleep": False}
    e = memory("actor ref engine", 12, **awake)
    assert (e.training, e.generation) == (15, 15)


def test_activations():
    """1,024 tokens: 4 layers x 256 x 2 bytes of checkpoints and 1,000 x 4 of logits each."""
    assert memory("actor").activations * 2**30 == 1024 * (4 * 256 * 2 + 4000)
    assert memory("engine").activations == 0


def test_shortfalls_name_the_phase_the_parts_and_the_flags():
    flags = Training.from_flags(FLAGS)
    (training,) = shortfalls({"actor": memory("actor", 8)}, flags, 8)
    assert training.startswith("actor: training needs at least 9.0 GiB of a GPU's 8, 1.0 GiB too much")
    assert "weights 2.0 + gradients 1.0 + optimizer 6.0; --ds.zero_stage 3" in training
    (cache,) = shortfalls({"engine": memory("engine", 6)}, flags, 6)
    assert "KV cache holds 0 tokens, --data.max_len 1024" in cache
    assert shortfalls({"engine": memory("engine", 8)}, flags, 8) == []


def test_shapes_are_counted_exactly(tiny):
    from openrlhf_bipace.launch.dry_run import model_shape

    shape = model_shape(str(tiny.folder))
    assert shape.parameters == sum(p.numel() for p in tiny.model.parameters())
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_dim) == (3, 64, 1, 32)
