"""The FAISS backends: an index proposes a row's nearest leaders, float32 and float64 decide between them.

Seed centroids only. Inside a block everything is exact (`seeds.SeedBlocks`); only the search among older leaders is
the index's. `faiss-flat` stays exact: where the k-th neighbour still matters, the row is compared with every leader.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from openrlhf_bipace.clustering.precision import Judge, full_float32, unit32
from openrlhf_bipace.clustering.seeds import Pairs, SeedBlocks, on

NEIGHBOURS = 8  # leaders asked for per row
PROBES = 8  # ivf: lists searched, of the square root of the number of rows
LINKS, EF = 32, 64  # hnsw: links per node, candidates kept while searching
TRAIN = 64  # ivf: rows per list that place the lists
SAMPLE = 2048  # rows whose leader is checked afterwards


def load_faiss() -> Any:
    """The faiss module, able to take tensors. ValueError when it is missing."""
    try:
        import faiss
        import faiss.contrib.torch_utils
    except ImportError as error:
        raise ValueError(
            f"--bipace.cluster_backend: faiss does not load ({error}); allowed without it: auto | exact | reference"
        ) from None
    return faiss


class IndexBlocks(SeedBlocks):
    """`SeedBlocks` whose older leaders sit in a FAISS index."""

    def __init__(self, phi: torch.Tensor, rows: np.ndarray, judge: Judge, kind: str) -> None:
        super().__init__(phi, rows, judge)
        self.kind, self.index, self.gpu = kind, make_index(phi, rows, kind), on_gpu(load_faiss(), phi)

    def append(self, x: torch.Tensor, seeds: np.ndarray) -> None:
        super().append(x, seeds)
        self.index.add(x if self.gpu else x.cpu())

    def search(self, x: torch.Tensor, best: np.ndarray) -> list[Pairs]:
        if not len(self.seeds):
            return []
        found = self.index.search(x if self.gpu else x.cpu(), min(NEIGHBOURS, len(self.seeds)))
        cosine, leader = (tensor.cpu().numpy() for tensor in found)
        cosine = np.where(leader >= 0, cosine, np.float32(-2.0))  # fewer found than asked for
        np.maximum(best, cosine.max(axis=1), out=best)
        least = self.least(best)
        row, column = np.nonzero(cosine >= least[:, None])
        pairs = [Pairs(row, leader[row, column], cosine[row, column])]
        crowded = np.flatnonzero(cosine[:, -1] >= least) if leader.shape[1] < len(self.seeds) else row[:0]
        if self.kind == "flat" and len(crowded):
            found = self.product(x[on(crowded, x)], self.leaders[: len(self.seeds)], 0, best[crowded])
            pairs = [Pairs(*(column[~np.isin(row, crowded)] for column in pairs[0]))]
            pairs.append(found._replace(row=crowded[found.row]))
        return pairs

    def same_leader(self, leader: np.ndarray) -> float:
        """Share of a sample of rows that have the nearest older leader, or rightly none.

        Args:
            leader: [n] positions that `run` returned.
        """
        sample = np.random.default_rng(0).permutation(len(self.rows))[:SAMPLE]
        x = unit32(self.phi, self.rows[sample])
        cosine = (x @ self.leaders[: len(self.seeds)].T).cpu().numpy()
        cosine[self.seeds[None, :] >= sample[:, None]] = -2.0
        own = cosine[np.arange(len(sample)), np.searchsorted(self.seeds, leader[sample])]
        best = cosine.max(axis=1)
        right = np.where(leader[sample] == sample, best < self.near + self.bound, own >= best - 2 * self.bound)
        return float(right.mean())


def make_index(phi: torch.Tensor, rows: np.ndarray, kind: str) -> Any:
    """An empty inner-product index, on the GPU if `phi` and FAISS are there (HNSW exists on the CPU only)."""
    faiss, d = load_faiss(), phi.shape[1]
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(d, LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = index.hnsw.efConstruction = EF
        return index
    index = faiss.IndexFlatIP(d)
    lists = max(1, int(len(rows) ** 0.5))
    if kind == "ivf":
        index = faiss.IndexIVFFlat(index, d, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1  # small groups may have few
    if on_gpu(faiss, phi):
        index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), phi.device.index or 0, index)
    if kind == "ivf":
        sample = rows[:: max(1, len(rows) // (TRAIN * lists))]
        index.train(unit32(phi, sample) if on_gpu(faiss, phi) else unit32(phi, sample).cpu())
        index.nprobe = min(PROBES, lists)
    return index


def on_gpu(faiss: Any, phi: torch.Tensor) -> bool:
    """Whether the index of `phi` lives on its GPU."""
    return phi.is_cuda and hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


def find(
    phi: torch.Tensor, groups: list[np.ndarray], epsilon: float, centroid: str, kind: str
) -> tuple[np.ndarray, dict[str, Any]]:
    """As `greedy.greedy` for seed centroids, with the given kind of index per group; `stats` holds `same_leader`."""
    leader, judge, same = np.empty(len(phi), dtype=np.int64), Judge(phi, epsilon), []
    with full_float32():
        for rows in groups:
            blocks = IndexBlocks(phi, rows, judge, kind)
            positions = blocks.run()
            leader[rows] = rows[positions]
            same.append(blocks.same_leader(positions) * len(rows))
    return leader, {"judged": judge.asked, "same_leader": sum(same) / max(len(phi), 1)}


find_flat, find_ivf, find_hnsw = (partial(find, kind=kind) for kind in ("flat", "ivf", "hnsw"))
