"""Both centroid rules, exactly: groups side by side in blocks of rows, one row of every group at a time.

Per block and group there are two matrix products: the block against the centroids so far and against itself. When row
j joins cluster c, every later row's product with that cluster's sum grows by its product with j, and |s|^2 by
2 <s, x_j> + 1, so nothing of dimension d is touched inside a block.
"""

from __future__ import annotations

import numpy as np
import torch

from openrlhf_bipace.clustering.precision import Judge, Sums, mean_bound, pair_bound, unit32
from openrlhf_bipace.clustering.seeds import on

FREE = np.float32(-1e30)  # product with a cluster that does not exist yet
CANCELLING = 1e-12  # least |s|^2: where opposite vectors cancel, the bound is infinite and float64 decides


class Lockstep:
    """P groups of one `phi` [N, d].

    Args:
        groups: rows of each group in visiting order, the longest group first.
        mean: compare with the running mean, else with the first member.
        block: rows of each group taken at a time.
    """

    def __init__(self, phi: torch.Tensor, groups: list[np.ndarray], judge: Judge, mean: bool, block: int) -> None:
        self.phi, self.judge, self.mean, self.block = phi, judge, mean, block
        self.near = np.float32(1.0 - judge.limit)
        self.count = np.array([len(rows) for rows in groups])
        p, n = len(groups), len(groups[0])
        self.rows = np.stack([np.pad(rows, (0, n - len(rows)), mode="edge") for rows in groups])
        self.labels = np.full((p, n), -1, dtype=np.int64)
        self.exact = [Sums(judge, self.rows[i], self.labels[i]) for i in range(p)]
        self.k = np.zeros(p, dtype=np.int64)  # clusters of each group
        self.spread = 1.0  # largest members / |s| so far
        self.updates = 0  # roundings that the sums have taken, at most
        # Per group and cluster, with room to grow:
        self.seed = np.zeros((p, 0), dtype=np.int64)  # position of the first member
        self.members, self.square = np.zeros((p, 0)), np.ones((p, 0))  # count, |s|^2
        self.inverse = np.ones((p, 0), dtype=np.float32)  # 1 / |s|
        self.sums = torch.zeros(p, 0, phi.shape[1], device=phi.device)  # float32

    def run(self) -> list[np.ndarray]:
        """The row that leads each visited row, group by group."""
        n = int(self.count[0])
        for start in range(0, n, self.block):
            self._take_block(start, min(start + self.block, n))
        return [self.rows[p][self.seed[p][self.labels[p, :n]]] for p, n in enumerate(self.count)]

    def _take_block(self, start: int, stop: int) -> None:
        groups, length = int((self.count > start).sum()), stop - start
        x = unit32(self.phi, self.rows[:groups, start:stop].ravel()).view(groups, length, -1)
        old = int(self.k[:groups].max())
        self._reserve(old + length)
        known = self.products(x, old)
        products = torch.full((groups, length, old + length), float(FREE))
        products[:, :, :old] = known
        gram = torch.bmm(x, x.transpose(1, 2)).cpu().numpy()
        d = products.numpy()
        for p in np.flatnonzero(self.k[:groups] < old):
            d[p, :, self.k[p] : old] = FREE
        if groups == 1:
            self._take_rows_of_one(d[0], gram[0], start)
        else:
            for i in range(length):
                self._take_row(d, gram, start + i, i)
        self.store(x, start, stop)

    def _bound(self) -> float:
        if self.mean:
            return mean_bound(self.phi.shape[1], self.block, self.updates, self.spread)
        return pair_bound(self.phi.shape[1])

    def _take_row(self, d: np.ndarray, gram: np.ndarray, position: int, i: int) -> None:
        """Place the row at `position` of every group that has one; `i` counts rows inside the block."""
        live = int((self.count > position).sum())
        group, k = np.arange(live), self.k[:live]
        width, bound = int(k.max()), np.float32(self._bound())
        if width:
            cosine = d[:live, i, :width] * self.inverse[:live, :width]
            best = cosine.argmax(axis=1)
            top = cosine[group, best]
            cosine[group, best] = FREE
            second = cosine.max(axis=1)
            join = top >= self.near
            unsure = (np.abs(top - self.near) <= bound) | (join & (second >= top - 2 * bound))
            for p in np.flatnonzero(unsure):
                cosine[p, best[p]] = top[p]
                choice = self._ask(p, position, cosine[p, : k[p]], max(top[p] - 2 * bound, self.near - bound))
                join[p], best[p] = choice >= 0, choice
        else:
            best, join = np.zeros(live, dtype=np.int64), np.zeros(live, dtype=bool)
        new = group[~join]
        if len(new):
            self._seed(d, gram, new, position, i)
        self.labels[:live, position] = np.where(join, best, k - 1)
        joined = group[join]
        if len(joined):
            self._join(d, gram, joined, best[joined], i)

    def _take_rows_of_one(self, d: np.ndarray, gram: np.ndarray, start: int) -> None:
        """What `_take_row` does, for one group: plain numbers instead of index arrays, four times as fast."""
        k, near, mean, spread = int(self.k[0]), self.near, self.mean, self.spread
        seed, members, square, inverse = self.seed[0], self.members[0], self.square[0], self.inverse[0]
        labels, bound = self.labels[0], np.float32(self._bound())
        for i, row in enumerate(d):
            join = False
            if k:
                cosine = row[:k] * inverse[:k]
                c = int(cosine.argmax())
                top = cosine[c]
                join = top >= near
                cosine[c] = FREE
                if abs(top - near) <= bound or (join and cosine.max() >= top - 2 * bound):
                    cosine[c] = top
                    c = self._ask(0, start + i, cosine, max(top - 2 * bound, near - bound))
                    join = c >= 0
            if not join:
                c, k = k, k + 1
                d[i + 1 :, c] = gram[i, i + 1 :]
                seed[c] = start + i
                members[c] = square[c] = inverse[c] = 1.0
            elif mean:
                square[c] = max(square[c] + (2.0 * float(row[c]) + 1.0), CANCELLING)
                members[c] += 1.0
                inverse[c] = square[c] ** -0.5
                d[i + 1 :, c] += gram[i, i + 1 :]
                if members[c] * inverse[c] > spread:
                    self.spread = spread = float(members[c] * inverse[c])
                    bound = np.float32(self._bound())
            labels[start + i] = c
        self.k[0] = k

    def _ask(self, p: int, position: int, cosine: np.ndarray, least: float) -> int:
        """The nearest cluster within epsilon in float64, -1 for none; only those of `cosine` >= `least` can be it."""
        candidates = np.flatnonzero(cosine >= least)
        seeds = self.seed[p, candidates]
        if self.mean:
            distance = self.exact[p].distances(position, candidates, seeds)
        else:
            rows = self.rows[p]
            distance = self.judge.distances(np.full(len(seeds), rows[position]), rows[seeds])
        choice = self.judge.pick(distance)
        return int(candidates[choice]) if choice >= 0 else -1

    def _seed(self, d: np.ndarray, gram: np.ndarray, groups: np.ndarray, position: int, i: int) -> None:
        c = self.k[groups]
        d[groups, i + 1 :, c] = gram[groups, i + 1 :, i]
        self.seed[groups, c] = position
        self.members[groups, c] = self.square[groups, c] = self.inverse[groups, c] = 1.0
        self.k[groups] += 1

    def _join(self, d: np.ndarray, gram: np.ndarray, groups: np.ndarray, c: np.ndarray, i: int) -> None:
        if not self.mean:
            return
        square = self.square[groups, c] + (2.0 * d[groups, i, c] + 1.0)
        square = np.maximum(square, CANCELLING)
        members = self.members[groups, c] + 1.0
        inverse = 1.0 / np.sqrt(square)
        d[groups, i + 1 :, c] += gram[groups, i + 1 :, i]
        self.square[groups, c], self.members[groups, c], self.inverse[groups, c] = square, members, inverse
        self.spread = max(self.spread, float((members * inverse).max()))

    def products(self, x: torch.Tensor, old: int) -> torch.Tensor:
        """[groups, b, old] products of the block's unit rows with the first `old` sums of their groups."""
        return torch.bmm(x, self.sums[: len(x), :old].transpose(1, 2))

    def store(self, x: torch.Tensor, start: int, stop: int) -> None:
        """Add the block's rows to the sums of their clusters (means), or keep those that seeded one (seeds)."""
        groups, length, dim = x.shape
        labels = self.labels[:groups, start:stop]
        keep = labels >= 0
        if not self.mean:
            seeds = np.take_along_axis(self.seed[:groups], np.maximum(labels, 0), axis=1)
            keep &= seeds == np.arange(start, stop)
        cell = (labels + self.sums.shape[1] * np.arange(groups)[:, None])[keep]
        rows = x.reshape(-1, dim)
        if not keep.all():
            rows = rows[on(np.flatnonzero(keep.ravel()), x)]
        self._add(rows, cell)

    def _add(self, rows: torch.Tensor, cell: np.ndarray) -> None:
        """Add [M, d] rows to the sums at [M] `cell`, of all groups' sums one after another.

        Of one group, the block is added up first, so that each sum is rounded once per block; small groups need not.
        """
        flat = self.sums.view(-1, self.sums.shape[2])
        cells, slot = np.unique(cell, return_inverse=True)
        at = on(cells, rows)
        if len(self.k) == 1:
            block = rows.new_zeros(len(cells), flat.shape[1]).index_add_(0, on(slot, rows), rows)
            added = flat[at].add_(block)
            flat[at] = added
            self.updates += 1
        else:
            flat.index_add_(0, on(cell, rows), rows)
            added = flat[at] if self.mean else rows
            self.updates = int(self.members.max())
        if self.mean:
            square = torch.linalg.vector_norm(added, dim=1, dtype=torch.float64).square()
            self.measured(*np.divmod(cells, self.sums.shape[1]), square.cpu().numpy())

    def measured(self, group: np.ndarray, cluster: np.ndarray, square: np.ndarray) -> None:
        """Take squared lengths [M] of sums, in place of those that were added up."""
        square = np.maximum(square, CANCELLING)
        self.square[group, cluster], self.inverse[group, cluster] = square, 1.0 / np.sqrt(square)
        if len(square):
            spread = self.members[group, cluster] * self.inverse[group, cluster]
            self.spread = max(self.spread, float(spread.max()))

    def _reserve(self, clusters: int) -> None:
        cap = self.seed.shape[1]
        if clusters <= cap:
            return
        cap, grow = max(clusters, 2 * cap), max(clusters, 2 * cap) - cap
        for name, fill in (("seed", 0), ("members", 0), ("square", 1), ("inverse", 1)):
            setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, grow)), constant_values=fill))
        self.sums = torch.nn.functional.pad(self.sums, (0, 0, 0, grow))
