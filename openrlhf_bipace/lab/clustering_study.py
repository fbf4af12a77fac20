"""``bipace-study clustering``: what clustering and advantages of a batch would cost, far beyond what fits here.

Measures this machine's rates, then plays through one iteration: rollouts of random length, groups given to workers as
`integration.clustering` gives them, vectors fetched over the network, labels returned, advantages on the driver.
Nothing of dimension d is simulated on the driver, as nothing of it goes there.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages import StepBatch
from openrlhf_bipace.clustering import cluster
from openrlhf_bipace.config import BipaceConfig

CLUSTER_SIZE = 11.7  # steps per cluster in the paper's ALFWorld run
LABEL_BYTES, ROW_BYTES = 8, 24  # per step through the driver: its leader; where its vector lies and its group


@dataclass(slots=True)
class Rates:
    """What this machine does, one worker and one thread."""

    per_row: float  # seconds per step of clustering that grow with n
    per_pair: float  # seconds per step and cluster of its group
    per_step: float  # seconds per step of batch building, advantages and diagnostics
    copy: float  # bytes per second of a copy in memory: what fetching costs on one node


@dataclass(slots=True)
class Cost:
    """Seconds and bytes of one iteration."""

    steps: int
    prompts: int
    nodes: int
    workers: int
    fetch: float  # seconds until the slowest worker has its vectors
    cluster: float  # seconds until the slowest worker is done
    advantages: float  # seconds on the driver
    driver_mb: float  # through the driver
    worker_gb: float  # vectors of the most laden worker
    balance: float  # mean over largest load of the workers


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The study's flags."""
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts per prompt, G")
    parser.add_argument("--turns", type=int, default=50, help="longest rollout, T; lengths are uniform in [T / 2, T]")
    parser.add_argument("--dim", type=int, default=3584, help="dimension of the hidden states")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 1000, 30_000, 333_000], help="prompt groups")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 64], help="nodes")
    parser.add_argument("--workers", type=int, default=8, help="clustering workers per node")
    parser.add_argument("--network", type=float, default=100.0, help="Gbit/s of each node")
    parser.add_argument("--speedup", type=float, default=1.0, help="of a worker over one thread of this machine")
    parser.add_argument("--centroid", default="mean", choices=["mean", "seed"], help="as --bipace.centroid")
    parser.add_argument("--limit", type=int, default=10**8, help="largest number of steps that is played through")
    parser.add_argument("--out", type=Path, default=Path("runs/clustering_study.csv"), help="table as CSV")


def run(args: argparse.Namespace) -> None:
    """Measure, play through every size, print and write the table. ValueError for a size above the limit."""
    largest = max(args.prompts) * args.rollouts * args.turns
    if largest > 2 * args.limit:
        raise ValueError(f"--prompts: got {max(args.prompts):,}, {largest:,} steps, allowed: --limit {args.limit:,}")
    rates = measure(args.dim, args.centroid)
    jobs = [(prompts, nodes) for prompts in args.prompts for nodes in args.nodes]
    costs = [iteration(rates, args, prompts, nodes) for prompts, nodes in tqdm(jobs, desc="iterations")]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(costs[0])))
        writer.writeheader()
        writer.writerows(asdict(cost) for cost in costs)
    show(rates, costs, args)


def measure(d: int, centroid: str, seconds: float = 1.0) -> Rates:
    """This machine's rates with one thread, each from about `seconds` of work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = [100, 400, 1200]
        spent = [_per_call(_clustering(n, d, centroid), seconds / 3) for n in sizes]
        design = np.array([[n, n * n / CLUSTER_SIZE] for n in sizes], dtype=float)
        weight = 1 / np.array(spent)  # relative errors count
        fit, *_ = np.linalg.lstsq(design * weight[:, None], np.ones(len(sizes)), rcond=None)
        per_row, per_pair = np.maximum(fit, 0)
        block = torch.ones(16, 2**20)
        copy = 2 * block.nbytes / _per_call(block.clone, seconds / 3)
        return Rates(float(per_row), float(per_pair), _per_call(_advantages(20_000), seconds) / 20_000, copy)
    finally:
        torch.set_num_threads(threads)


def iteration(rates: Rates, args: argparse.Namespace, prompts: int, nodes: int) -> Cost:
    """One iteration of `prompts` groups on `nodes` nodes."""
    rng, workers = np.random.default_rng(0), nodes * args.workers
    lengths = rng.integers(args.turns // 2, args.turns + 1, size=(prompts, args.rollouts))
    group = np.sort(lengths.sum(axis=1))[::-1].astype(float)
    load = deal(group, workers)
    seconds = rates.per_row * group + rates.per_pair * group * np.maximum(group / CLUSTER_SIZE, 1)
    busy = deal(seconds, workers) / args.speedup
    steps = int(group.sum())
    vectors = load * args.dim * 2  # bfloat16
    far = vectors.max() * args.workers * (nodes - 1) / nodes / (args.network * 1e9 / 8)  # a node's link is shared
    near = vectors.max() / rates.copy
    driver = steps * (LABEL_BYTES + ROW_BYTES)
    return Cost(
        steps, prompts, nodes, workers, float(far + near), float(busy.max()), steps * rates.per_step, driver / 1e6,
        float(vectors.max()) / 1e9, float(busy.mean() / busy.max()),
    )  # fmt: skip


def deal(sizes: np.ndarray, workers: int) -> np.ndarray:
    """[workers] loads when [n] sizes, largest first, are dealt back and forth."""
    turn = np.arange(len(sizes))
    place = turn % (2 * workers)
    return np.bincount(np.minimum(place, 2 * workers - 1 - place), weights=sizes, minlength=workers)


def show(rates: Rates, costs: list[Cost], args: argparse.Namespace) -> None:
    console = Console(width=119)
    console.print(
        f"measured, one thread, d = {args.dim}: {rates.per_row * 1e6:.1f} us a step + {rates.per_pair * 1e9:.1f} ns a "
        f"step and cluster, advantages {rates.per_step * 1e6:.2f} us a step, copy {rates.copy / 1e9:.1f} GB/s"
    )
    table = Table(title=f"one iteration, seconds; {args.workers} workers a node, {args.network:g} Gbit/s")
    for name in ("steps", "prompts", "nodes", "fetch", "cluster", "advantages", "driver MB", "worker GB", "balance"):
        table.add_column(name, justify="right")
    for c in costs:
        figures = [f"{x:.3g}" for x in (c.fetch, c.cluster, c.advantages, c.driver_mb, c.worker_gb, c.balance)]
        table.add_row(f"{c.steps:,}", f"{c.prompts:,}", str(c.nodes), *figures)
    console.print(table)
    console.print(f"written to {args.out}")


def _clustering(n: int, d: int, centroid: str) -> Callable[[], object]:
    """Several groups of `n` states in random clusters of about the paper's size."""
    gen, groups = torch.Generator().manual_seed(n), max(1, 1200 // n)
    centre = torch.randn(groups, max(1, round(n / CLUSTER_SIZE)), d, generator=gen)
    state = torch.randint(0, centre.shape[1], (groups, n), generator=gen)
    phi = torch.stack([c[s] for c, s in zip(centre, state, strict=True)]).flatten(0, 1)
    phi = phi + 0.15 * torch.randn(phi.shape, generator=gen)
    group = torch.arange(groups).repeat_interleave(n)

    def call() -> float:
        cluster(phi, group, 0.05, centroid=centroid)
        return groups

    return call


def _advantages(n: int) -> Callable[[], object]:
    """From lists of keys, as rollouts bring them, to advantages."""
    row = torch.arange(n)
    ret = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codes = {"group": row // 400, "go": row % 7, "room": row % 9}
    group, action, seen = ([f"{name} {i}" for i in values.tolist()] for name, values in codes.items())

    def call() -> None:
        steps = StepBatch(group, row // 50 % 8, row % 50, ret, ret, action, seen, cluster=row // 12)
        advantages.estimate("bipace_q", steps, BipaceConfig())

    return call


def _per_call(call: Callable[[], object], seconds: float) -> float:
    """Processor seconds of the fastest call; of one group where the call says how many it did."""
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.process_time()
        done = call()
        times.append((time.process_time() - start) / (done if isinstance(done, int) else 1))
    return min(times)
