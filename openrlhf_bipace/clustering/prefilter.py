"""Certified prefilter: most pairs are excluded without touching dimension d.

A vector x is split into m coordinates p in an orthonormal basis and a rest of length r. Then
<x, c> <= <p_x, p_c> + r_x r_c (Cauchy and Schwarz), one product in m + 1 dimensions. Only pairs whose limit passes
epsilon and the best cosine so far get the product in d dimensions; where more than `DENSE` of a tile's pairs pass, the
whole tile gets it, so data without structure cost little more than plain blocks.
"""

from __future__ import annotations

import numpy as np
import torch

from openrlhf_bipace.clustering.precision import Judge, U, unit32
from openrlhf_bipace.clustering.seeds import TILE, Pairs, SeedBlocks

BASIS, SAMPLE = 64, 4096  # dimensions kept, rows the basis is fitted to
DENSE = 1 / 64  # share of passing pairs from which the whole product is cheaper
_PAIRS = 128  # pairs gathered at a time


class Prefilter(SeedBlocks):
    """`SeedBlocks` on the CPU with sketches of the leaders."""

    def __init__(self, phi: torch.Tensor, rows: np.ndarray, judge: Judge) -> None:
        super().__init__(phi, rows, judge)
        self.basis = fit_basis(phi, rows)  # [d, m] float64
        width = self.basis.shape[1] + 1
        self.sketches = torch.zeros(0, width)  # [cap, m + 1] float32, of the leaders
        # A sketch is coordinates and rest in float64, rounded to float32. It has length 1, so the product of two is
        # off by at most (m + 1) u from summation, 2 u from rounding and 8 u from the rows.
        self.slack = (width + 15) * U

    def search(self, x: torch.Tensor, best: np.ndarray) -> list[Pairs]:
        sketch, pairs = make_sketch(x, self.basis), []
        for first in range(0, len(self.seeds), TILE):
            last = min(first + TILE, len(self.seeds))
            found = self._search_sketch(x, sketch, first, last, best)
            pairs.append(found or self.product(x, self.leaders[first:last], first, best))
        return pairs

    def append(self, x: torch.Tensor, seeds: np.ndarray) -> None:
        super().append(x, seeds)
        more = len(self.leaders) - len(self.sketches)
        if more:
            self.sketches = torch.cat([self.sketches, torch.zeros(more, self.sketches.shape[1])])
        self.sketches[len(self.seeds) - len(seeds) : len(self.seeds)] = make_sketch(x, self.basis)

    def _search_sketch(
        self, x: torch.Tensor, sketch: torch.Tensor, first: int, last: int, best: np.ndarray
    ) -> Pairs | None:
        """Pairs with leaders `first` to `last`, through the limits; None if too many pairs pass them."""
        limit = (sketch @ self.sketches[first:last].T).numpy()
        hot = np.flatnonzero(limit.max(axis=1) >= self.least(best) - self.slack)
        limit = limit[hot]
        column = limit.argmax(axis=1) if len(hot) else hot
        cosine = self._cosines(x, hot, column + first)
        best[hot] = np.maximum(best[hot], cosine)
        limit[np.arange(len(hot)), column] = -2.0
        passed = np.flatnonzero(limit >= (self.least(best[hot]) - self.slack)[:, None])
        if len(passed) > DENSE * len(x) * (last - first):
            return None
        row, other = np.divmod(passed, last - first)
        row = hot[row]
        more = self._cosines(x, row, other + first)
        np.maximum.at(best, row, more)
        return Pairs(np.append(hot, row), np.append(column + first, other + first), np.append(cosine, more))

    def _cosines(self, x: torch.Tensor, row: np.ndarray, leader: np.ndarray) -> np.ndarray:
        self.pairs += len(row)
        a, b, out = x.numpy(), self.leaders.numpy(), np.empty(len(row), dtype=np.float32)
        for s in range(0, len(row), _PAIRS):
            part = slice(s, s + _PAIRS)
            np.einsum("ij,ij->i", a[row[part]], b[leader[part]], out=out[part])
        return out


def fit_basis(phi: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """[d, m] float64 orthonormal basis, near the leading directions of a sample of rows."""
    m = max(1, min(BASIS, phi.shape[1] // 4))
    x = unit32(phi, rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE])
    y = torch.randn(x.shape[1], m, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        y = torch.linalg.qr(x.T @ (x @ y)).Q
    return torch.linalg.qr(y.double()).Q


def make_sketch(x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """[b, m + 1] float32: coordinates of [b, d] unit rows in the basis, and the length of what they leave out."""
    exact = x.double()
    p = exact @ basis
    rest = (exact.square().sum(1) - p.square().sum(1)).clamp_(min=0).add_(1e-14).sqrt_()
    return torch.cat([p, rest[:, None]], dim=1).float()
