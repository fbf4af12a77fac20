"""The goal table of docs/clustering.md in one run: ``python benchmarks/clustering.py``.

Every row is a ratio to its bound, one float32 matrix product of n x K x d by the same BLAS in the same process, taken
in turn with ours; the fastest of several runs counts, in seconds of processor time, which other users of the machine
disturb least (wall time is shown too). Synthetic hidden states: a strong common direction, Zipf state popularity,
noise within a state below epsilon.
"""

from __future__ import annotations

import argparse
import difflib
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_info
from tqdm import tqdm

from openrlhf_bipace.clustering import CENTROIDS, cluster

EPSILON = 0.05
CONSOLE = Console(width=119)
ROOT = Path(__file__).parent.parent


def states(n: int, d: int, k: int, seed: int = 0, rank: int = 128, spread: float = 0.8) -> torch.Tensor:
    """[n, d] float32: common direction + state (of `k`, in `rank` dimensions) + noise, rows of length 1."""
    rng = np.random.default_rng(seed)
    rank = min(rank, d - 1)
    basis = np.linalg.qr(rng.standard_normal((d, rank + 1)))[0].astype(np.float32)
    centre = rng.standard_normal((k, rank), dtype=np.float32) * (np.arange(1, rank + 1) ** -0.5).astype(np.float32)
    centre *= spread / np.linalg.norm(centre, axis=1, keepdims=True)
    popularity = 1 / np.arange(1, k + 1)
    out = np.empty((n, d), dtype=np.float32)
    noise = np.float32(np.sqrt(0.012 * (1 + spread**2) / d))
    for s in tqdm(range(0, n, 20_000), desc=f"{n:,} x {d:,} states", leave=False, disable=n < 50_000):
        state = rng.choice(k, size=min(20_000, n - s), p=popularity / popularity.sum())
        x = centre[state] @ basis[:, 1:].T
        x += basis[:, 0]
        x += noise * rng.standard_normal(x.shape, dtype=np.float32)
        out[s : s + len(x)] = x / np.linalg.norm(x, axis=1, keepdims=True)
    return torch.from_numpy(out)


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """(processor seconds, wall seconds, result)."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = function()
    return time.process_time() - cpu, time.perf_counter() - wall, result


def bound(n: int, k: int, d: int, groups: int = 1) -> tuple[float, float]:
    """(processor, wall) seconds of a product n x k x d per group; of a large n only a part is run."""
    a, b = torch.randn(min(n, 4096), d), torch.randn(k, d)
    a @ b.T
    times = [timed(lambda: [a @ b.T for _ in range(groups)])[:2] for _ in range(3)]
    return tuple(min(column) * n / len(a) for column in zip(*times, strict=True))


def against_bound(work: str, phi: torch.Tensor, group: np.ndarray, goal: float, repeats: int, **options: Any) -> dict:
    """One row of the table: the fastest of `repeats` runs over the bound."""
    times, found = [], None
    for _ in range(repeats):
        cpu, wall, found = timed(lambda: cluster(phi, group, EPSILON, **options))
        times.append((cpu, wall))
    groups = len(np.unique(group))
    k = max(1, round(len(found.sizes) / groups))
    cpu, wall = (min(column) for column in zip(*times, strict=True))
    base_cpu, base_wall = bound(len(phi) // groups, k, phi.shape[1], groups)
    return {
        "work": work, "K": len(found.sizes), "cpu": cpu, "wall": wall, "bound_cpu": base_cpu, "bound_wall": base_wall,
        "ratio": cpu / base_cpu, "goal": goal, "stats": found.stats, "labels": found,
    }  # fmt: skip


def exactness() -> dict[str, float]:
    """Share of labels equal to the float64 reference's, chains at epsilon and ties included."""
    rng, out = np.random.default_rng(0), {}
    u, v = (np.linalg.qr(rng.standard_normal((300, 64, 2)))[0]).transpose(2, 0, 1)
    gap = np.cumsum(np.arccos(1 - EPSILON - 1e-6 - rng.uniform(-1e-6, 1e-6, (300, 12))), axis=1)[..., None]
    chains = (np.cos(gap) * u[:, None] + np.sin(gap) * v[:, None]).reshape(-1, 64)
    lattice = rng.integers(-1, 3, (3000, 6)) + 0.0
    lattice[(lattice == 0).all(1), 0] = 1
    for name, x in (("chains", rng.permutation(chains)), ("ties", lattice)):
        for centroid in CENTROIDS:
            ours, true = (
                cluster(torch.from_numpy(x), np.zeros(len(x), int), EPSILON, centroid=centroid, backend=backend)
                for backend in ("exact", "reference")
            )
            out[f"{name}, {centroid}"] = float((ours.leader[ours.labels] == true.leader[true.labels]).double().mean())
    return out


def small_groups(repeats: int) -> list[dict]:
    """48 groups of 400 x 1,536 against the bound and the plain loop."""
    phi = torch.cat([states(400, 1536, 60, seed=s) for s in range(48)])
    group, rows = np.repeat(np.arange(48), 400), []
    for centroid in CENTROIDS:
        row = against_bound(f"48 groups of 400 x 1536, {centroid}", phi, group, 3.0, repeats, centroid=centroid)
        loop = timed(lambda c=centroid: cluster(phi, group, EPSILON, centroid=c, backend="reference"))
        row["loop"] = loop[0] / row["cpu"]
        row["equal"] = bool(torch.equal(loop[2].labels, row["labels"].labels))
        rows.append(row)
    return rows


def approximate(phi: torch.Tensor, exact: dict, kinds: list[str]) -> list[dict]:
    """FAISS on the data of `exact`: time over exact's, share of rows with the same leader."""
    group, rows = np.zeros(len(phi), dtype=np.int64), []
    true = exact["labels"]
    for kind in kinds:
        cpu, wall, found = timed(lambda k=kind: cluster(phi, group, EPSILON, centroid="seed", backend=k))
        same = float((found.leader[found.labels] == true.leader[true.labels]).double().mean())
        single = float((found.sizes == 1).sum() / len(phi) - (true.sizes == 1).sum() / len(phi))
        rows.append(
            {
                "work": f"{kind}, {len(phi):,} x {phi.shape[1]:,}", "cpu": cpu, "wall": wall,
                "over_exact": cpu / exact["cpu"], "same_leader": same, "singleton_difference": single,
                "stats": found.stats,
            }
        )  # fmt: skip
    return rows


def peers(phi: torch.Tensor) -> dict[str, float]:
    """Wall seconds of other ways to group 400 steps of one prompt group; they answer other questions."""
    import hnswlib
    from sklearn.cluster import DBSCAN, AgglomerativeClustering

    x, rng = phi.numpy(), np.random.default_rng(0)
    words = [f"word{i}" for i in range(200)]
    texts = [" ".join(rng.choice(words, 120))[:800] for _ in range(60)]
    texts = [texts[i] for i in rng.integers(0, 60, len(x))]

    def hnsw() -> None:
        index = hnswlib.Index(space="cosine", dim=x.shape[1])
        index.init_index(len(x))
        index.add_items(x)
        index.knn_query(x, k=1)

    def similar() -> None:
        leaders: list[str] = []
        for text in texts:
            if not any(difflib.SequenceMatcher(None, text, other).ratio() >= 0.95 for other in leaders):
                leaders.append(text)

    ways = {
        "exact, mean": lambda: cluster(phi, np.zeros(len(x), int), EPSILON, backend="exact"),
        "plain loop, mean": lambda: cluster(phi, np.zeros(len(x), int), EPSILON, backend="reference"),
        "scikit-learn DBSCAN": lambda: DBSCAN(eps=EPSILON, min_samples=1, metric="cosine").fit(x),
        "scikit-learn complete linkage": lambda: AgglomerativeClustering(
            n_clusters=None, distance_threshold=EPSILON, metric="cosine", linkage="complete"
        ).fit(x),
        "hnswlib build + 1-NN": hnsw,
        "hash of the text": lambda: {hash(text): i for i, text in enumerate(texts)},
        "difflib on the text": similar,
    }
    return {name: min(timed(way)[1] for _ in range(1 if "difflib" in name else 3)) for name, way in ways.items()}


def auto_grid() -> list[tuple[int, int, float]]:
    """(rows, d, time of `exact` over time of `reference`) for one group: what `auto` is chosen by."""
    out = []
    for n in (16, 64, 256, 1024):
        for d in (16, 256, 1536):
            phi, group = states(n, d, max(n // 7, 2)), np.zeros(n, dtype=np.int64)
            run = {b: partial(cluster, phi, group, EPSILON, backend=b) for b in ("exact", "reference")}
            best = {b: min(timed(run[b])[0] for _ in range(5)) for b in run}
            out.append((n, d, best["exact"] / best["reference"]))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="of torch; processor time is summed over them")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each work, the fastest counts")
    parser.add_argument("--hundred-k", action="store_true", help="also 100,000 x 1,536 (1 GB, minutes)")
    parser.add_argument("--million", action="store_true", help="also 1,000,000 x 1,536 (8 GB, a quarter of an hour)")
    parser.add_argument("--draw", type=Path, nargs="+", help="only draw docs/clustering.png from such files")
    parser.add_argument("--out", type=Path, default=Path("runs/clustering.json"), help="where the figures go")
    args = parser.parse_args()
    if args.draw:
        draw([json.loads(path.read_text()) for path in args.draw], ROOT / "docs" / "clustering.png")
        return
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"blas": kernels(), "threads": args.threads}
    CONSOLE.print(f"BLAS: {result['blas']}; torch: {torch.__config__.show().splitlines()[1:6]}")
    result["labels equal to the reference"] = exactness()
    CONSOLE.print(result["labels equal to the reference"])
    rows = small_groups(args.repeats)
    large = states(12_800, 3584, 1800)
    one = np.zeros(len(large), dtype=np.int64)
    for centroid, goal in (("seed", 0.9), ("mean", 1.3)):
        work = f"one group, 12,800 x 3,584, {centroid}"
        rows.append(against_bound(work, large, one, goal, args.repeats, centroid=centroid, backend="exact"))
    result["auto"] = auto_grid()
    result["peers"] = peers(states(400, 1536, 60))
    result["approximate"] = []
    del large
    for size, wanted, k, goal in ((100_000, args.hundred_k, 24_000, 0.35), (1_000_000, args.million, 30_000, 0.4)):
        if wanted:
            phi = states(size, 1536, k)
            work = f"one group, {size:,} x 1,536, seed"
            group = np.zeros(size, dtype=np.int64)
            row = against_bound(work, phi, group, goal, 1, centroid="seed", backend="exact")
            row["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            rows.append(row)
            CONSOLE.print(f"{work}: {row['ratio']:.3f} x bound, peak {row['peak_gb']:.1f} GB")
            result["approximate"] += approximate(phi, row, ["faiss-ivf"] if size > 200_000 else KINDS)
            del phi
    result["rows"] = [{k: v for k, v in row.items() if k != "labels"} for row in rows]
    show(result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2, default=str) + "\n")


KINDS = ["faiss-flat", "faiss-ivf", "faiss-hnsw"]


def kernels() -> list[str]:
    """Every BLAS copy in the process, with the processor it takes this one for."""
    import faiss  # noqa: F401  (brings its own)

    blas = [i for i in threadpool_info() if i["user_api"] == "blas"]
    return [f"{Path(i['filepath']).name} {i['version']} {i.get('architecture')} {i['num_threads']} thr" for i in blas]


def show(result: dict[str, Any]) -> None:
    table = Table(title="against one product n x K x d (processor time)")
    for heading in ("work", "K", "cpu s", "wall s", "bound s", "ratio", "goal", "loop / ours"):
        table.add_column(heading, justify="left" if heading == "work" else "right")
    for r in result["rows"]:
        met = "met" if r["ratio"] <= r["goal"] else "missed"
        loop = f"{r['loop']:.1f}" if "loop" in r else ""
        figures = [f"{r[name]:.2f}" for name in ("cpu", "wall", "bound_cpu", "ratio")]
        table.add_row(r["work"], f"{r['K']:,}", *figures, f"{r['goal']} {met}", loop)
    CONSOLE.print(table)
    for r in result["approximate"]:
        CONSOLE.print(
            f"{r['work']}: {r['over_exact']:.2f} x exact's time, same leader {r['same_leader']:.4f} "
            f"(sampled {r['stats']['same_leader']:.4f}), singletons {r['singleton_difference']:+.4f}"
        )
    CONSOLE.print("one group of 400, seconds: " + ", ".join(f"{k} {v:.4f}" for k, v in result["peers"].items()))
    CONSOLE.print("exact / reference: " + ", ".join(f"{n} x {d}: {r:.2f}" for n, d, r in result["auto"]))


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Ratios beside their goals, and what an approximate index saves and costs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for result in results for row in result["rows"]][::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=[3, 2], layout="constrained")
    colours = ["tab:blue" if row["ratio"] <= row["goal"] else "tab:red" for row in rows]
    left.barh([row["work"] for row in rows], [row["ratio"] for row in rows], color=colours, height=0.6)
    for y, row in enumerate(rows):
        left.plot([row["goal"]] * 2, [y - 0.4, y + 0.4], color="black")
        left.text(max(row["ratio"], row["goal"]), y, f" {row['ratio']:.2f}", va="center", fontsize=9)
    left.set_xlabel("time over one product n x K x d (black: goal; red: missed)")
    left.set_xlim(0, 1.15 * max(max(row["ratio"], row["goal"]) for row in rows))
    left.tick_params(labelsize=8)
    others = [row for result in results for row in result["approximate"]][::-1]
    right.barh([row["work"].split(" x")[0] for row in others], [row["over_exact"] for row in others], height=0.6)
    for y, row in enumerate(others):
        right.text(row["over_exact"], y, f" {row['same_leader']:.2%}", va="center", fontsize=9)
    right.axvline(1, color="black")
    right.tick_params(labelsize=8)
    right.set_xlim(0, 1.3 * max(row["over_exact"] for row in others))
    right.set_xlabel("time over exact's; label: same leader")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
