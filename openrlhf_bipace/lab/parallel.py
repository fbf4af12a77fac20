"""Many independent computations over a few processes, each on one thread, with a progress bar."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def pool(workers: int) -> Iterator[Callable[[Callable[[Any], T], Sequence[Any], str], list[T]]]:
    """A ``map(function, items, what)`` with a progress bar, over `workers` processes (1: in this one)."""
    from tqdm import tqdm

    one_thread()
    if workers == 1:
        yield lambda function, items, what: [function(item) for item in tqdm(items, desc=f"   {what}")]
        return
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    with ProcessPoolExecutor(workers, context, one_thread) as executor:
        yield lambda function, items, what: list(
            tqdm(executor.map(function, items), desc=f"   {what}", total=len(items))
        )


def one_thread() -> None:
    """Keep torch in this process to one thread: tiny models gain nothing from more."""
    import torch

    torch.set_num_threads(1)
