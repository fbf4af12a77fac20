"""One group too large for one worker, exactly: centroids are sharded, blocks of rows go to every shard.

A shard answers for its centroids, one place resolves: it alone decides who joins whom, with `seeds.SeedBlocks` or
`lockstep.Lockstep`. Per block every shard gets one call, which also brings what the block before has settled.
Cluster c lives in shard c % W. Nothing here knows how a call travels: `call` is a list's or Ray's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from openrlhf_bipace.clustering.lockstep import Lockstep
from openrlhf_bipace.clustering.precision import Judge, full_float32, unit32
from openrlhf_bipace.clustering.seeds import BLOCK, Pairs, SeedBlocks, on

MEAN_BLOCK = 256  # rows of a block with running means, of `BLOCK` with seeds

# (block number, what the block before settled) -> the shards' answers, in order
Call = Callable[[int, Any], Sequence[Any]]


def block_size(centroid: str) -> int:
    """Rows of the blocks that shards take, the last one excepted."""
    return MEAN_BLOCK if centroid == "mean" else BLOCK


class Shard:
    """Shard `own` of `count`: every `count`-th centroid, from number `own` on."""

    def __init__(self, d: int, epsilon: float, own: int, count: int, device: torch.device | str = "cpu") -> None:
        self.own, self.count = own, count
        none = torch.zeros(0, d, device=device)
        self.leaders = SeedBlocks(none, np.zeros(0, np.int64), Judge(none, epsilon))
        self.sums = none  # [cap, d] float32, running means only
        self.k = 0  # centroids here
        self.block: torch.Tensor | None = None  # [b, d] unit rows of the latest block

    def search(self, block: torch.Tensor, new: tuple[np.ndarray, np.ndarray]) -> Pairs:
        """Seeds: take the leaders settled in the block before, then pairs of `block` with the leaders here.

        Args:
            block: [b, d] vectors as they came.
            new: (rows of the block before, their leader numbers) of all its new leaders.
        """
        with full_float32():
            rows, number = (array[new[1] % self.count == self.own] for array in new)
            if len(rows):
                self.leaders.append(self.block[on(rows, self.block)], number)
            self.block = unit32(block.to(self.sums.device), np.arange(len(block)))
            best = np.full(len(block), -2.0, dtype=np.float32)
            pairs = Pairs.join(self.leaders.search(self.block, best))
            keep = pairs.cosine >= self.leaders.least(best)[pairs.row]
        row, local, cosine = (column[keep] for column in pairs)
        return Pairs(row, self.leaders.seeds[local], cosine)

    def products(self, block: torch.Tensor, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means: add the block before to its clusters, then products of `block` with the sums here.

        Args:
            labels: [b] cluster of each row of the block before.

        Returns:
            [b, k] products, the clusters whose sums grew, and their squared lengths.
        """
        with full_float32():
            mine = np.flatnonzero(labels % self.count == self.own)
            number, slot = np.unique(labels[mine], return_inverse=True)
            local = number // self.count
            square = np.zeros(0)
            if len(mine):
                self.k = max(self.k, int(local.max()) + 1)
                if self.k > len(self.sums):
                    self.sums = torch.nn.functional.pad(self.sums, (0, 0, 0, max(MEAN_BLOCK, self.k)))
                place = on(local, self.sums)
                added = self.sums.new_zeros(len(number), self.sums.shape[1])
                added.index_add_(0, on(slot, added), self.block[on(mine, added)])
                added += self.sums[place]
                self.sums[place] = added
                square = torch.linalg.vector_norm(added, dim=1, dtype=torch.float64).square().cpu().numpy()
            self.block = unit32(block.to(self.sums.device), np.arange(len(block)))
            return (self.block @ self.sums[: self.k].T).cpu().numpy(), number, square


class ShardedSeeds(SeedBlocks):
    """The resolving side for seed centroids."""

    def __init__(self, phi: Any, rows: np.ndarray, judge: Judge, call: Call) -> None:
        super().__init__(phi, rows, judge)
        self.call, self.number = call, 0
        self.new = (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def search(self, x: torch.Tensor, best: np.ndarray) -> list[Pairs]:
        pairs = list(self.call(self.number, self.new))
        self.number, self.new = self.number + 1, (np.zeros(0, np.int64), np.zeros(0, np.int64))
        for found in pairs:
            np.maximum.at(best, found.row, found.cosine)
        return pairs

    def append(self, x: torch.Tensor, seeds: np.ndarray) -> None:
        numbers = np.arange(len(self.seeds), len(self.seeds) + len(seeds))
        self.new = (seeds - (self.number - 1) * BLOCK, numbers)
        self.seeds = np.append(self.seeds, seeds)


class ShardedMeans(Lockstep):
    """The resolving side for running means."""

    def __init__(self, phi: Any, rows: np.ndarray, judge: Judge, call: Call, shards: int) -> None:
        super().__init__(phi, [rows], judge, mean=True, block=MEAN_BLOCK)
        self.call, self.shards, self.number = call, shards, 0
        self.settled = np.zeros(0, np.int64)  # labels of the block before
        self.sums = self.sums[:, :, :0]  # the shards hold them

    def products(self, x: torch.Tensor, old: int) -> torch.Tensor:
        out = np.empty((1, x.shape[1], old), dtype=np.float32)
        for own, (part, number, square) in enumerate(self.call(self.number, self.settled)):
            out[0, :, own :: self.shards] = part
            self.measured(np.zeros_like(number), number, square)
        self.number += 1
        return torch.from_numpy(out)

    def store(self, x: torch.Tensor, start: int, stop: int) -> None:
        self.settled = self.labels[0, start:stop].copy()
        self.updates += 1


def find_sharded(phi: Any, rows: np.ndarray, epsilon: float, centroid: str, call: Call, shards: int) -> np.ndarray:
    """[n] position of the leader of each of `rows`, in visiting order, equal to `greedy.greedy`'s.

    Args:
        phi: [N, d] vectors; anything that gives rows by ``phi[index]`` and ``phi.index_select(0, index)``.
        call: hands a block's number and what was settled before to every shard's `search` or `products`.
    """
    judge = Judge(phi, epsilon)
    with full_float32():
        if centroid == "seed":
            return ShardedSeeds(phi, rows, judge, call).run()
        means = ShardedMeans(phi, rows, judge, call, shards)
        means.run()
        return means.seed[0][means.labels[0]]
