"""``bipace-train --dry_run``: the layout and its memory in words, before anything is started."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from typing import Any

from openrlhf_bipace import advantages
from openrlhf_bipace.config import LaunchConfig
from openrlhf_bipace.launch.memory import Estimate, ModelShape, Training, estimate, shortfalls
from openrlhf_bipace.launch.placement import Layout, Slot, check_batches

DEFAULT_GPUS_PER_NODE, DEFAULT_GPU_GIB = 8, 80.0


def model_shape(name: str) -> ModelShape:
    """Shape of the model folder or hub name `name`: built without its weights, so every parameter is counted."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name, trust_remote_code=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    text = config.get_text_config()
    heads = text.num_attention_heads
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
    )


def machine(config: LaunchConfig, gpus: int) -> tuple[int, int, float, list[str]]:
    """Nodes, GPUs per node, GiB per GPU, and in words which of them were assumed."""
    import torch

    assumed = []
    per_node, memory = config.gpus_per_node, config.gpu_memory
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not per_node:
        per_node = here or DEFAULT_GPUS_PER_NODE
        assumed += [] if here else [f"{per_node} GPUs per node (--launch.gpus_per_node)"]
    if not memory:
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if here else DEFAULT_GPU_GIB
        assumed += [] if here else [f"{memory:g} GiB per GPU (--launch.gpu_memory)"]
    nodes = config.nodes or int(os.environ.get("SLURM_JOB_NUM_NODES", 0)) or math.ceil(gpus / per_node)
    return nodes, per_node, memory, assumed


def plan(flags: Mapping[str, Any], config: LaunchConfig) -> tuple[str, list[str]]:
    """The layout and the memory estimates as text, and what does not fit into a GPU, one sentence each.

    Raises ValueError for a layout with too few GPUs, naming asked and available, and for batches that do not divide.
    """
    layout = Layout.from_flags(flags)
    nodes, per_node, gpu_gib, assumed = machine(config, layout.gpus)
    slots = layout.place(nodes, per_node)
    check_batches(flags, pads=advantages.is_ours(flags["algo.advantage.estimator"]))
    training = Training.from_flags(flags)
    shape = model_shape(flags["actor.model_name_or_path"])
    kinds = {slot.members: ", ".join(sorted(slot.members)) for slot in slots}
    estimates = {words: estimate(members, shape, training, gpu_gib) for members, words in kinds.items()}
    left = nodes * per_node - len(slots)
    used = f"{nodes} nodes x {per_node} GPUs of {gpu_gib:g} GiB: {len(slots)} GPUs used, {left} left"
    lines = [used] + ([f"Assumed, not seen: {', '.join(assumed)}"] if assumed else [])
    lines += [_as_text(_placement_table(slots)), ""]
    lines += [
        f"{shape.parameters / 1e9:.2f}e9 parameters, {shape.kv_bytes_per_token / 1024:.0f} KiB of KV cache per token"
    ]
    lines += [_as_text(_memory_table(estimates))]
    return "\n".join(lines), shortfalls(estimates, training, gpu_gib)


def _as_text(table: Any) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue().rstrip()


def _placement_table(slots: list[Slot]) -> Any:
    from rich.table import Table

    table = Table("node", "GPU", "actors")
    for slot in slots:
        table.add_row(str(slot.node), str(slot.gpu), ", ".join(slot.actors))
    return table


def _memory_table(estimates: Mapping[str, Estimate]) -> Any:
    from rich.table import Table

    table = Table("GiB on a GPU with", *estimates)
    for name in ("weights", "gradients", "optimizer", "reference", "engine"):
        table.add_row(name, *(f"{getattr(e, name):.1f}" for e in estimates.values()))
    table.add_section()
    for name in ("training", "generation"):
        table.add_row(f"at least, during {name}", *(f"{getattr(e, name):.1f}" for e in estimates.values()))
    table.add_row("activations, at most", *(f"{e.activations:.1f}" for e in estimates.values()))
    table.add_row("tokens in the KV cache", *(f"{e.kv_tokens:,}" for e in estimates.values()))
    return table
