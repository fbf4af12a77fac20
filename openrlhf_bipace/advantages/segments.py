"""Sums over parts of a batch, without a loop: the arithmetic that every estimator is written in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLAT = 1e-8  # values of a part that differ by no more are equal: their advantage is exactly 0, in every mode
EPS = 1e-6  # added to a std before dividing [verl-agent]


def dense(codes: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Renumber [N] int64 codes >= 0 to 0 .. K-1, equal codes alike. Returns ([N] labels, K)."""
    n = len(codes)
    if not n:
        return codes, 0
    top = int(codes.max()) + 1
    if top > max(4 * n, 2**20):
        values, labels = torch.unique(codes, return_inverse=True)
        return labels, len(values)
    # Tables beat sorting. Where codes are sparse, only the cells that occur are touched: whichever row writes a cell
    # last stands for its code.
    if top > 4 * n:
        row = torch.arange(n)
        codes = torch.empty(top, dtype=torch.int64).scatter_(0, codes, row).index_select(0, codes)
        number = (codes == row).cumsum(0)
    else:
        number = torch.bincount(codes).clamp_(max=1).cumsum_(0)
    count = int(number[-1])
    return number.sub_(1).index_select(0, codes), count


def pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Labels of the distinct pairs (a_i, b_i) of two [N] int64 codes >= 0. Returns ([N] labels, K)."""
    if not len(a):
        return a, 0
    return dense(torch.add(b, a, alpha=int(b.max()) + 1))


def add(values: torch.Tensor, label: torch.Tensor, count: int) -> torch.Tensor:
    """[K] float64 sums of [N] float64 `values` by label."""
    return torch.zeros(count, dtype=torch.float64).scatter_add_(0, label, values)


def sizes(label: torch.Tensor, count: int) -> torch.Tensor:
    """[K] float64 number of rows by label."""
    return add(torch.ones(len(label), dtype=torch.float64), label, count)


def owner(part: torch.Tensor, label: torch.Tensor, count: int) -> torch.Tensor:
    """[K] int64: of each of the K labels, the `part` [N] that its rows share."""
    return torch.empty(count, dtype=torch.int64).scatter_(0, label, part)


def elsewhere(row: torch.Tensor, part: torch.Tensor, count: int, *values: torch.Tensor) -> list[torch.Tensor]:
    """[N] number of rows of other trajectories (`row`) in each row's part, and [N] the sum of each value over them."""
    own, owns = pair(part, row)
    every = (torch.ones(len(row), dtype=torch.float64), *values)
    return [add(x, part, count).index_select(0, part) - add(x, own, owns).index_select(0, own) for x in every]


@dataclass(slots=True)
class Parts:
    """A partition of N rows into K parts, with the values' moments inside each part.

    `x` are the values minus their part's minimum: only differences matter to an advantage, and this way a part of
    equal values gives exact zeros, whatever is made of them, and a large constant costs no precision.
    """

    label: torch.Tensor  # [N] int64, 0 .. K-1
    count: int  # K
    size: torch.Tensor  # [K] float64, rows per part (sum of their weights, if weighted)
    x: torch.Tensor  # [N] float64, value - minimum of the part; 0 in parts whose values are equal within FLAT
    total: torch.Tensor  # [K] float64, (weighted) sum of x
    n: torch.Tensor  # [N] float64, size of the row's part
    mean: torch.Tensor  # [N] float64, (weighted) mean of x over the row's part
    weight: torch.Tensor | None  # [N] float64, what each row counts; None: 1

    @classmethod
    def of(cls, values: torch.Tensor, label: torch.Tensor, count: int, weight: torch.Tensor | None = None) -> Parts:
        """Parts of [N] float64 `values` under dense [N] int64 `label`."""
        low = torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce_(0, label, values, "amin")
        high = torch.full((count,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, label, values, "amax")
        flat = high - low <= FLAT
        x = values - low.index_select(0, label)
        if flat.any():
            x = x.masked_fill_(flat.index_select(0, label), 0.0)
        size = sizes(label, count) if weight is None else add(weight, label, count)
        total = add(x if weight is None else weight * x, label, count)
        mean = (total / size).index_select(0, label)
        return cls(label, count, size, x, total, size.index_select(0, label), mean, weight)

    def per_row(self, values: torch.Tensor) -> torch.Tensor:
        """[N] of [K] `values`: each row gets its part's."""
        return values.index_select(0, self.label)

    def others(self) -> torch.Tensor:
        """[N] mean of x over the other rows of the part (leave-one-out); 0 where there is none."""
        return (self.per_row(self.total) - self.x) / (self.n - 1).clamp(min=1)

    def over_std(self, values: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
        """`values` [N] over (std of the part + EPS)."""
        square = (self.x - self.mean).square_()
        if self.weight is not None:
            square *= self.weight
        # A part of one has no spread; its values are 0, so any divisor but 0 will do.
        variance = add(square, self.label, self.count) / (self.size - int(unbiased)).clamp(min=1)
        return values / self.per_row(variance.sqrt_() + EPS)
