"""Hidden states from a forward that runs anyway: a hook on one decoder layer. Needs torch, nothing of the host."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from openrlhf_bipace.integration.host import decoder_layers

Positions = list[list[int]]  # per row of a micro-batch: token indices to read


class HiddenStates:
    """What one forward returns besides log-probabilities.

    Args:
        stacked: [turns, d], row after row of the micro-batch, in the model's type.
        turns: of each row.
        seconds: time the hook took.
    """

    def __init__(self, stacked: torch.Tensor, turns: Sequence[int], seconds: float) -> None:
        self.stacked, self.turns, self.seconds = stacked, list(turns), seconds

    @property
    def vectors(self) -> list[torch.Tensor]:
        """Per row: [turns of the row, d], views of `stacked`."""
        return list(self.stacked.split(self.turns))

    def __reduce__(self) -> tuple[Any, ...]:
        """One array on the way to another process: a pickled tensor is slow, and a view takes all of its storage."""
        return _rebuilt, (to_array(self.stacked), self.turns, self.seconds)


def _rebuilt(stacked: np.ndarray, turns: list[int], seconds: float) -> HiddenStates:
    return HiddenStates(to_tensor(stacked), turns, seconds)


def to_array(x: torch.Tensor) -> np.ndarray:
    """bfloat16 travels as int16: Ray moves numpy arrays without a copy, and numpy has no bfloat16."""
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def to_tensor(x: np.ndarray) -> torch.Tensor:
    """What `to_array` was given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Ray shares is read-only, and so is what we do with it
        tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def gather_rows(hidden: torch.Tensor, positions: Positions, attention_mask: torch.Tensor) -> torch.Tensor:
    """Vectors at `positions`.

    Args:
        hidden: [rows, T, d] of a padded batch, or [1, tokens, d] of a packed one.
        positions: per row, indices into the padded sequence.
        attention_mask: [rows, T].

    Returns:
        [sum of turns, d] in row order.
    """
    rows = torch.tensor([i for i, row in enumerate(positions) for _ in row], device=hidden.device, dtype=torch.long)
    columns = torch.tensor([t for row in positions for t in row], device=hidden.device, dtype=torch.long)
    if hidden.shape[:2] == attention_mask.shape:
        return hidden[rows, columns]
    packed = attention_mask.to(hidden.device).flatten().cumsum(0)[rows * attention_mask.shape[1] + columns] - 1
    return hidden[0, packed]


@contextmanager
def capture(model: Any, layer: int, positions: Positions, attention_mask: torch.Tensor) -> Iterator[Callable]:
    """Read ``hidden_states[layer]`` of `model` at `positions` during the forward that runs inside the block.

    Yields a function that returns `HiddenStates` on the host once the forward has run. Only the wanted positions
    leave the hook, so memory grows by turns x d.
    """
    taken: list[torch.Tensor] = []
    seconds = 0.0

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        nonlocal seconds
        start = time.perf_counter()
        hidden = output[0] if isinstance(output, tuple) else output
        taken.append(gather_rows(hidden, positions, attention_mask))  # a copy to the host here would stall the device
        seconds += time.perf_counter() - start

    def result() -> HiddenStates:
        start = time.perf_counter()
        stacked = taken[0].cpu()
        return HiddenStates(stacked, [len(row) for row in positions], seconds + time.perf_counter() - start)

    handle = decoder_layers(model)[layer].register_forward_hook(hook)
    try:
        yield result
    finally:
        handle.remove()
