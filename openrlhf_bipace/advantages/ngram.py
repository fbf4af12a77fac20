"""Lexical coarsening of observations: the control that asks whether hidden states know more than shared words."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from openrlhf_bipace.advantages.batch import StepBatch
from openrlhf_bipace.advantages.segments import pair
from openrlhf_bipace.clustering import cluster
from openrlhf_bipace.config import BipaceConfig

DIM = 512  # hash buckets


def ngram(steps: StepBatch, config: BipaceConfig) -> tuple[torch.Tensor, int]:
    """Clusters of hashed word n-gram counts, by the same rule and epsilon as hidden states [ours; spec section 6].

    Two texts are as near as the cosine of their n-gram counts, so word order beyond n words is ignored. Needs a
    number for `config.epsilon`: `calibration.calibrate(vectors(...), ...)` finds one.
    """
    if steps.observation_text is None:
        raise ValueError("StepBatch.observation_text is None: the ngram partition reads the observations' words")
    phi = vectors(steps.observation_text, config.ngram)
    within, order = steps.within(config.scope)[0], steps.order(config.order)
    found = cluster(phi, within, float(config.epsilon), centroid=config.centroid, order=order)
    return pair(within, found.labels)


def vectors(texts: Sequence[str], n: int, dim: int = DIM) -> torch.Tensor:
    """[N, dim] float32 counts of the hashed n-grams of lower-cased, space-separated words. Never a zero vector.

    Texts are padded with n - 1 start marks and one end mark, so that short and empty ones have an n-gram too. The
    hash is CRC-32: the same in every process, unlike Python's own.
    """
    rows = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    counts = np.zeros((len(rows), dim), dtype=np.float32)
    for text, row in rows.items():
        words = ["\x02"] * (n - 1) + text.lower().split() + ["\x03"]
        for i in range(len(words) - n + 1):
            counts[row, zlib.crc32(" ".join(words[i : i + n]).encode()) % dim] += 1
    return torch.from_numpy(counts[np.fromiter(map(rows.__getitem__, texts), np.int64, len(texts))])
