"""Partitions: which steps are compared with which. Parts never cross prompt groups, unless --bipace.scope is batch.

To add one: a function ``(steps, config) -> (labels [N] int64 from 0 without gaps, number of parts)`` and one line in
`PARTITIONS`; the estimators ``<name>_v``, ``<name>_q`` and ``<name>_diff`` then exist.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from openrlhf_bipace.advantages.batch import StepBatch
from openrlhf_bipace.advantages.ngram import ngram
from openrlhf_bipace.advantages.segments import pair
from openrlhf_bipace.config import BipaceConfig

Labels = tuple[torch.Tensor, int]


def observation(steps: StepBatch, config: BipaceConfig) -> Labels:
    """Equal observation text [GiGPO]."""
    return pair(steps.within(config.scope)[0], steps.observation_key)


def hidden(steps: StepBatch, config: BipaceConfig) -> Labels:
    """Clusters of the actor's hidden states (BiGPO) [paper], as labelled by `clustering.cluster`."""
    if steps.cluster is None:
        raise ValueError("StepBatch.cluster is None: this estimator needs the labels of clustering.cluster(...)")
    if len(steps.cluster) != len(steps):  # it may be set after the batch was checked
        raise ValueError(f"StepBatch.cluster: got {len(steps.cluster)} labels, expected {len(steps)}, one per row")
    return pair(steps.within(config.scope)[0], torch.as_tensor(steps.cluster))


def one(steps: StepBatch, config: BipaceConfig) -> Labels:
    """The whole group (or batch): the control that any clustering has to beat [ours]."""
    return steps.within(config.scope)


def state(steps: StepBatch, config: BipaceConfig) -> Labels:
    """The environment's true state [ours]: what a perfect partition would give."""
    if steps.state_key is None or bool((steps.state_key < 0).any()):
        raise ValueError("StepBatch.state_key is unknown for some rows: this environment does not tell its true state")
    return pair(steps.within(config.scope)[0], steps.state_key)


PARTITIONS: dict[str, Callable[[StepBatch, BipaceConfig], Labels]] = {
    "observation": observation,
    "hidden": hidden,
    "one": one,
    "ngram": ngram,
    "state": state,
}
