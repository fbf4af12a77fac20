"""What BiPACE adds to a forward on this machine's GPU: ``make bench-gpu``, at most 8 minutes.

Random weights in the shapes of Qwen2.5-7B and 1.5B, a batch of 128 rollouts of 50 turns. Needs torch, transformers and
this package without the host; FAISS is measured if it is there. Three things are timed in turn on the same
micro-batches: the old-log-probability forward as OpenRLHF runs it, the same with the hook that reads every turn's
hidden state, and what the paper does instead, a second forward. Then the clustering and the advantages of the batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages import StepBatch
from openrlhf_bipace.clustering import cluster
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.integration.hidden import capture

SHAPES: dict[str, dict[str, int]] = {
    "Qwen2.5-1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151_936,
    },
    "Qwen2.5-7B": {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 9, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
LAYER, GROUP = -8, 8  # the layer that is read; rollouts per prompt
STEP_IN_FORWARDS = 4  # old log-probabilities, and forward with backward: a lower bound of a step without its rollouts


def build(shape: str, device: torch.device) -> Any:
    """A policy of that shape with random weights, in bfloat16 on CUDA."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES[shape]), dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def synchronised(device: torch.device, function: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds with the device idle before and after, result)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


@torch.no_grad()
def log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each next token, on the host, row by row to bound the float32 logits."""
    logits = model(ids).logits[:, :-1]
    rows = zip(logits, ids[:, 1:], strict=True)
    return torch.stack([x.float().log_softmax(-1).gather(-1, y[:, None])[:, 0] for x, y in rows]).cpu()


def forwards(model: Any, args: argparse.Namespace, device: torch.device, until: float) -> dict[str, Any]:
    """Seconds per micro-batch, and every turn's hidden state."""
    length = args.turns * args.tokens
    positions = [[turn * args.tokens + args.tokens // 2 for turn in range(args.turns)]] * args.micro
    gen = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {"plain": [], "hooked": [], "separate": [], "hook": []}
    phi, peak = [], {}
    batches = args.rows // args.micro
    for number in tqdm(range(batches + 1), desc="micro-batches"):  # the first warms up
        ids = torch.randint(0, model.config.vocab_size, (args.micro, length), generator=gen).to(device)
        mask = torch.ones_like(ids)

        def hooked(ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> Any:
            with capture(model, LAYER, positions, mask) as hidden:
                log_probs(model, ids)
            return hidden()

        def separate(ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> None:
            with torch.no_grad(), capture(model, LAYER, positions, mask) as hidden:
                model.model(ids)
            hidden()

        ways = {"plain": lambda ids=ids: log_probs(model, ids), "hooked": hooked, "separate": separate}
        order = list(ways) if number % 2 else list(ways)[::-1]
        for name in order:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            seconds, result = synchronised(device, ways[name])
            if device.type == "cuda":
                peak[name] = torch.cuda.max_memory_allocated(device)
            if number:
                times[name].append(seconds)
            if name == "hooked":
                states = result
        if number:
            times["hook"].append(states.seconds)
            phi.append(states.stacked)
        if number and time.perf_counter() > until:
            break
    return {"times": times, "peak": peak, "phi": torch.cat(phi), "rows": len(phi) * args.micro}


def stage(phi: torch.Tensor, rows: int, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Seconds to move, cluster and turn into advantages one batch of hidden states."""
    row = torch.arange(rows).repeat_interleave(args.turns)
    ret = torch.rand(len(phi), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    key = torch.arange(len(phi)) % 7
    steps = StepBatch(row // GROUP, row % GROUP, torch.arange(len(phi)) % args.turns, ret, ret, key, key)
    out = {}
    for name, where in {"cpu": torch.device("cpu"), device.type: device}.items():
        moved = phi.to(where)
        cluster(moved, steps.group, 0.1)  # warms up
        seconds, found = synchronised(where, lambda x=moved: cluster(x, steps.group, 0.1))
        out[f"clustering on {name}"] = seconds
    steps.cluster = found.labels
    out["advantages"] = synchronised(device, lambda: advantages.estimate("bipace_q", steps, BipaceConfig()))[0]
    return out


def large(device: torch.device, n: int, d: int, k: int) -> dict[str, float]:
    """Seconds for one group of `n` states, against one product n x K x d; FAISS where it is installed."""
    gen = torch.Generator(device=device).manual_seed(0)
    centre = torch.randn(k, d, generator=gen, device=device)
    phi = centre[torch.randint(0, k, (n,), generator=gen, device=device)]
    phi = phi + 0.15 * torch.randn(n, d, generator=gen, device=device)
    group, out = torch.zeros(n, dtype=torch.int64), {}
    for backend in ("exact", "faiss-flat", "faiss-ivf"):
        run = partial(cluster, phi, group, 0.05, centroid="seed", backend=backend)
        try:
            seconds, found = synchronised(device, run)
        except ValueError as error:
            print(f"{backend}: {error}")
            continue
        out[backend] = seconds
        out[f"{backend} clusters"] = float(len(found.sizes))
    leaders = phi[: int(out["exact clusters"])]
    parts = phi.split(8192)
    out["bound"] = min(synchronised(device, lambda: [x @ leaders.T for x in parts] and None)[0] for _ in range(3))
    return out


def measure(shape: str, args: argparse.Namespace, device: torch.device, until: float) -> dict[str, Any]:
    """Everything about one shape."""
    run = forwards(build(shape, device), args, device, until)
    middle = {name: statistics.median(values) for name, values in run["times"].items()}
    paired = [h - p for h, p in zip(run["times"]["hooked"], run["times"]["plain"], strict=True)]
    batches = len(paired)
    spent = stage(run["phi"], run["rows"], args, device)
    added = middle["hook"] * batches + spent[f"clustering on {device.type}"] + spent["advantages"]
    return {
        "rows": run["rows"], "turns": len(run["phi"]), "seconds per micro-batch": middle,
        "hooked minus plain, median of pairs": statistics.median(paired),
        "second forward, share of plain": middle["separate"] / middle["plain"],
        "peak bytes": run["peak"], "stage": spent,
        "added, share of the old-log-probability forward": added / (middle["plain"] * batches),
        "added, share of a step of 4 forwards": added / (middle["plain"] * batches * STEP_IN_FORWARDS),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see that it runs")
    parser.add_argument("--tiny", action="store_true", help="a model of 64 dimensions and 16 rows of 6 turns")
    parser.add_argument("--shapes", nargs="+", default=["Qwen2.5-1.5B", "Qwen2.5-7B"], choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=128, help="rollouts")
    parser.add_argument("--turns", type=int, default=50, help="of each rollout")
    parser.add_argument("--tokens", type=int, default=40, help="of each turn, prompt and response")
    parser.add_argument("--micro", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds; fewer micro-batches if they run short")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.json"), help="where the figures go")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got 'cuda', but torch sees no CUDA device; allowed here: cpu (with --tiny)")
    if args.tiny:
        args.shapes, args.rows, args.turns, args.tokens = ["tiny"], 16, 6, 8
    device, start = torch.device(args.device), time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for number, shape in enumerate(args.shapes, 1):
        result[shape] = measure(shape, args, device, start + args.budget * 0.7 * number / len(args.shapes))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    size = (2000, 64, 300) if args.tiny else (100_000, 1536, 12_000)
    result["one group of {:,} x {:,}".format(*size)] = large(device, *size)
    result["seconds"] = time.perf_counter() - start
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main()
