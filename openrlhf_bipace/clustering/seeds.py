"""Seed centroids of one large group, exactly: blocks of rows against the leaders so far.

The partition is the lexicographically first maximal independent set of the epsilon graph, so a block is resolved as a
whole: find every row's nearest older leader, then among the rows without one the new leaders in order, then let all
rows of the block compare with those of them that came before. Subclasses search the older leaders in other ways.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from openrlhf_bipace.clustering.precision import Judge, pair_bound, unit32

BLOCK, TILE = 1024, 2048  # rows, leaders of one product


class Pairs(NamedTuple):
    """Rows of a block, leaders, and their float32 cosines: three [M] arrays."""

    row: np.ndarray
    leader: np.ndarray
    cosine: np.ndarray

    @staticmethod
    def join(pairs: list[Pairs]) -> Pairs:
        """All of `pairs` as one."""
        if not pairs:
            return Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
        return Pairs(*(np.concatenate(column) for column in zip(*pairs, strict=True)))


class SeedBlocks:
    """One group of `phi` [N, d]: `rows` in visiting order. Searches older leaders by plain products."""

    def __init__(self, phi: torch.Tensor, rows: np.ndarray, judge: Judge) -> None:
        self.phi, self.rows, self.judge = phi, rows, judge
        self.bound, self.near = pair_bound(phi.shape[1]), 1.0 - judge.limit
        self.leaders = torch.zeros(0, phi.shape[1], device=phi.device)  # [cap, d] float32 unit rows
        self.seeds = np.zeros(0, dtype=np.int64)  # [K] position of each leader
        self.pairs = 0  # products in d dimensions

    def run(self) -> np.ndarray:
        """[n] position of the row that leads each visited row."""
        leader = np.empty(len(self.rows), dtype=np.int64)
        for start in range(0, len(self.rows), BLOCK):
            block = slice(start, start + BLOCK)
            leader[block] = self._take_block(start, unit32(self.phi, self.rows[block]))
        return leader

    def search(self, x: torch.Tensor, best: np.ndarray) -> list[Pairs]:
        """Pairs of [b, d] unit rows with older leaders that may be a row's nearest; raises `best` [b] to them."""
        tiles = range(0, len(self.seeds), TILE)
        return [self.product(x, self.leaders[a : min(a + TILE, len(self.seeds))], a, best) for a in tiles]

    def append(self, x: torch.Tensor, seeds: np.ndarray) -> None:
        """Take [q, d] unit rows at positions `seeds` as leaders."""
        k, total = len(self.seeds), len(self.seeds) + len(seeds)
        if total > len(self.leaders):
            room = max(BLOCK, len(self.leaders) // 2)
            self.leaders = torch.cat([self.leaders, x.new_zeros(room, x.shape[1])])
        self.leaders[k:total] = x
        self.seeds = np.append(self.seeds, seeds)

    def _take_block(self, start: int, x: torch.Tensor) -> np.ndarray:
        """[b] positions that lead the block's rows."""
        best = np.full(len(x), -2.0, dtype=np.float32)
        pairs = self.search(x, best)
        new = self._new_leaders(x, self._uncovered(Pairs.join(pairs), best, start), start)
        if len(new):
            leaders = x[on(new, x)]
            pairs.append(self.product(x, leaders, len(self.seeds), best, at=new))
            self.append(leaders, start + new)
        own = self._nearest(Pairs.join(pairs), best, start)
        own[new] = np.arange(len(self.seeds) - len(new), len(self.seeds))
        return self.seeds[own]

    def least(self, best: np.ndarray) -> np.ndarray:
        """[b] float32 cosine below which a leader cannot be the row's nearest."""
        return np.maximum(best - 2 * self.bound, self.near - self.bound).astype(np.float32)

    def product(
        self, x: torch.Tensor, leaders: torch.Tensor, first: int, best: np.ndarray, at: np.ndarray | None = None
    ) -> Pairs:
        """Pairs with `leaders` that may be a row's nearest, by one product; raises `best` [b] to their cosines.

        `at`: the leaders are these rows of the block itself, and only rows after them may join them.
        """
        self.pairs += len(x) * len(leaders)
        cosine = x @ leaders.T
        if at is not None:
            cosine.masked_fill_(on(at, x)[None, :] >= torch.arange(len(x), device=x.device)[:, None], -2.0)
        np.maximum(best, cosine.amax(dim=1).cpu().numpy(), out=best)
        row, column = torch.nonzero(cosine >= on(self.least(best), x)[:, None]).unbind(1)
        value = cosine[row, column].cpu().numpy()
        return Pairs(row.cpu().numpy(), column.cpu().numpy() + first, value)

    def _uncovered(self, pairs: Pairs, best: np.ndarray, start: int) -> np.ndarray:
        """Rows of the block without a leader within epsilon so far."""
        covered, doubtful = best >= self.near, np.abs(best - self.near) <= self.bound
        if doubtful.any():
            covered &= ~doubtful
            ask = doubtful[pairs.row] & (pairs.cosine >= self.near - self.bound)
            row, leader = pairs.row[ask], pairs.leader[ask]
            near = self.judge.near(self.rows[start + row], self.rows[self.seeds[leader]])
            covered[row[near]] = True
        return np.flatnonzero(~covered)

    def _new_leaders(self, x: torch.Tensor, uncovered: np.ndarray, start: int) -> np.ndarray:
        """Of the uncovered rows, in order, those that no earlier one of them covers."""
        u = x[on(uncovered, x)]
        gram = (u @ u.T).cpu().numpy()
        close = gram >= self.near
        a, b = np.nonzero(np.triu(np.abs(gram - self.near) <= self.bound, 1))
        if len(a):
            rows = self.rows[start + uncovered]
            close[a, b] = close[b, a] = self.judge.near(rows[a], rows[b])
        new, free = [], np.ones(len(uncovered), dtype=bool)
        while free.any():
            i = int(free.argmax())
            new.append(i)
            free &= ~close[i]
            free[i] = False
        return uncovered[new]

    def _nearest(self, pairs: Pairs, best: np.ndarray, start: int) -> np.ndarray:
        """[b] leader of every row, -1 for those that have none before them."""
        keep = pairs.cosine >= self.least(best)[pairs.row]
        order = np.lexsort((pairs.leader[keep], pairs.row[keep]))
        row, leader = pairs.row[keep][order], pairs.leader[keep][order]
        own = np.full(len(best), -1, dtype=np.int64)
        own[row] = leader  # right where there is one candidate, surely within epsilon
        several = np.bincount(row, minlength=len(best)) > 1
        ask = (several | (best < self.near + self.bound))[row]
        row, leader = row[ask], leader[ask]
        distance = self.judge.distances(self.rows[start + row], self.rows[self.seeds[leader]])
        edges = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
        for first, last in zip(edges[:-1], edges[1:], strict=True):
            choice = self.judge.pick(distance[first:last])
            own[row[first]] = leader[first + choice] if choice >= 0 else -1
        return own


def on(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """`array` as a tensor on the device of `like`."""
    return torch.from_numpy(array).to(like.device)
