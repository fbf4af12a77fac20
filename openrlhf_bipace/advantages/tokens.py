"""The one place where values per step become values per token (spec section 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_tokens(
    values: torch.Tensor | Sequence[float],
    rows: torch.Tensor | Sequence[int],
    starts: torch.Tensor | Sequence[int],
    ends: torch.Tensor | Sequence[int],
    n_rows: int,
    length: int,
) -> torch.Tensor:
    """Write each step's value on its response tokens and on nothing else -> [n_rows, length - 1] float32.

    Column t of a row belongs to the prediction of token t + 1, so a response at tokens s .. e-1 fills columns s-1 ..
    e-2. An empty span (s = e) fills nothing.

    Args:
        values: [N] float.
        rows: [N] int, the training row of each step.
        starts, ends: [N] int, the step's response tokens as end-exclusive indices into the full sequence.
        n_rows, length: rows and tokens per row of the batch, padding included.

    Raises:
        ValueError: a span outside its row, or one that starts at token 0 (nothing predicts it), or two that overlap.
    """
    values = torch.as_tensor(values, dtype=torch.float64)
    rows, starts, ends = (torch.as_tensor(x, dtype=torch.int64) for x in (rows, starts, ends))
    lengths = [len(values), len(rows), len(starts), len(ends)]
    if len(set(lengths)) > 1:
        raise ValueError(f"lengths differ: values, rows, starts, ends have {lengths}")
    bad = (rows < 0) | (rows >= n_rows) | (starts < 1) | (ends < starts) | (ends > length)
    if bad.any():
        i = int(torch.nonzero(bad)[0])
        raise ValueError(
            f"step {i}: tokens {int(starts[i])}:{int(ends[i])} of row {int(rows[i])}, expected 1 <= start <= end <= "
            f"{length} and a row in 0 .. {n_rows - 1}"
        )
    width = max(length - 1, 0)
    counts = ends - starts
    within = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    cell = torch.repeat_interleave(rows * width + starts - 1, counts) + within
    _check_overlap(cell, n_rows, width)
    out = torch.zeros(n_rows * width, dtype=torch.float32)
    out[cell] = torch.repeat_interleave(values, counts).float()
    return out.view(n_rows, width)


def write(values: Sequence[float] | torch.Tensor, spans: Sequence[tuple[int, int]], length: int) -> torch.Tensor:
    """`to_tokens` for one row of `length` tokens -> [length - 1] float32. spans: [(start, end)] end-exclusive."""
    starts, ends = [s for s, _ in spans], [e for _, e in spans]
    return to_tokens(values, [0] * len(starts), starts, ends, 1, length)[0]


def _check_overlap(cell: torch.Tensor, n_rows: int, width: int) -> None:
    if not len(cell):
        return
    hits = torch.bincount(cell, minlength=n_rows * width)
    if int(hits.max()) > 1:
        at = int(hits.argmax())
        raise ValueError(f"row {at // width}: token {at % width + 1} lies in the spans of {int(hits[at])} steps")


def loss_weights(
    kind: str,
    step: torch.Tensor | Sequence[int],
    trajectory: torch.Tensor | Sequence[int],
    tokens: torch.Tensor | Sequence[int],
) -> torch.Tensor:
    """What each turn's tokens weigh in the policy loss under ``--bipace.loss_agg`` -> [N] float64 [ours].

    The host divides the sum over tokens by the number of tokens in the optimizer step. With these weights on the
    tokens that quotient is a mean over `kind`: every "token", every "turn" or every "trajectory" of the step counts
    the same. PPO's loss is proportional to the advantage, so a weight may ride on it.

    Args:
        step: [N] int, the optimizer step of each turn.
        trajectory: [N] int, its trajectory; all turns of one lie in one step.
        tokens: [N] int, its response tokens.

    Raises:
        ValueError: an unknown `kind`.
    """
    step, trajectory, tokens = (torch.as_tensor(x, dtype=torch.int64) for x in (step, trajectory, tokens))
    if kind == "token":
        return torch.ones(len(tokens), dtype=torch.float64)
    if kind not in ("turn", "trajectory"):
        raise ValueError(f"loss_agg: got {kind!r}, allowed: token | turn | trajectory")
    length = tokens.double()
    unit = torch.arange(len(tokens)) if kind == "turn" else torch.unique(trajectory, return_inverse=True)[1]
    of_unit = torch.zeros(len(tokens), dtype=torch.float64).index_add_(0, unit, length)
    speaking = torch.unique(torch.stack([step, unit])[:, tokens > 0], dim=1)[0]  # the step of each unit with tokens
    steps = int(step.max()) + 1 if len(step) else 0
    units = torch.bincount(speaking, minlength=steps).double()
    total = torch.zeros(steps, dtype=torch.float64).index_add_(0, step, length)
    return total[step] / (units[step] * of_unit[unit]).clamp(min=1.0)
