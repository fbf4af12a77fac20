"""The process that clusters, and how hidden states reach it: through Ray's object store, never through the driver."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from openrlhf_bipace.clustering import BadVector, check_vectors, cluster
from openrlhf_bipace.clustering.sharded import Shard, block_size, find_sharded
from openrlhf_bipace.integration.hidden import to_array, to_tensor


@dataclass(slots=True)
class HiddenRefs:
    """What a forward says about hidden states that stayed where they are."""

    refs: dict[int, Any]  # worker -> object with the vectors of its rows, in row order
    seconds: float  # time the hook took


def publish(vectors: Sequence[torch.Tensor], owners: Sequence[int]) -> dict[int, Any]:
    """Put the vectors of a micro-batch into the object store, one object per worker that wants rows of it.

    Args:
        vectors: per row [turns, d], in the model's type. owners: per row, its worker.
    """
    return {
        own: ray.put(to_array(torch.cat([v for v, o in zip(vectors, owners, strict=True) if o == own])))
        for own in dict.fromkeys(owners)
    }


class Gatherer:
    """Vectors of a list of objects by [n, 2] (object, row): a worker's view of what others have put."""

    is_cuda, device = False, torch.device("cpu")

    def __init__(self, refs: list[Any], where: np.ndarray) -> None:
        self.refs, self.where = refs, where
        self.shape = (len(where), self.parts([0])[0].shape[1])

    def parts(self, objects: Sequence[int]) -> list[torch.Tensor]:
        """The given objects."""
        return [to_tensor(array) for array in ray.get([self.refs[i] for i in objects])]

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        where = self.where[index.numpy()]
        objects, slot = np.unique(where[:, 0], return_inverse=True)
        parts = self.parts(objects.tolist())
        widths = sorted({part.shape[1] for part in parts})
        if len(widths) > 1:
            raise ValueError(
                f"hidden states: got vectors of {widths} dimensions, expected as many in every micro-batch"
            )
        first = np.cumsum([0, *(len(part) for part in parts[:-1])])
        return torch.cat(parts)[torch.from_numpy(first[slot] + where[:, 1])]

    def index_select(self, _dim: int, index: torch.Tensor) -> torch.Tensor:
        """As torch's, along dimension 0."""
        return self[index]


def _device() -> torch.device:
    """A worker's GPU if --bipace.cluster_gpus gave it one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class ClusterWorker:
    """The actor: clusters whole groups, or is one shard of a group that is split."""

    def __init__(self) -> None:
        self._key: Any = None
        self._phi: torch.Tensor | None = None
        self._shard: Shard | None = None

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def find(
        self, key: int, refs: list[Any], where: np.ndarray, groups: np.ndarray, options: dict[str, Any]
    ) -> tuple[np.ndarray, dict[str, Any]] | BadVector:
        """Cluster rows in the order given: the position that leads each, and figures for the log.

        Args:
            key: names the vectors; a second call with the same key finds them loaded.
            where: [n, 2] (object in `refs`, row in it). groups: [n] codes. options: of `clustering.cluster`.
        """
        if key != self._key:
            phi = Gatherer(refs, where)[torch.arange(len(where))]
            self._phi, self._key = phi.to(_device()), key
        try:
            found = cluster(self._phi, groups, **options)
        except BadVector as error:
            return error
        return found.leader[found.labels].numpy(), found.stats

    def pack(self, refs: list[Any], where: np.ndarray, size: int) -> list[Any] | BadVector:
        """Blocks of `size` rows in the order of `where`, in the object store."""
        x = Gatherer(refs, where)[torch.arange(len(where))]
        try:
            check_vectors(x)
        except BadVector as error:
            return error
        return [ray.put(to_array(block.contiguous())) for block in x.split(size)]

    def open_shard(self, d: int, epsilon: float, own: int, count: int) -> None:
        """Be shard `own` of `count`."""
        self._shard = Shard(d, epsilon, own, count, _device())

    def answer(self, centroid: str, block: np.ndarray, settled: Any) -> Any:
        """The shard's part of a block: Ray has resolved `block` already."""
        shard = self._shard
        return (shard.products if centroid == "mean" else shard.search)(to_tensor(block), settled)

    def lead(self, blocks: list[Any], n: int, epsilon: float, centroid: str, others: list[Any]) -> np.ndarray:
        """Resolve a split group with this worker's shard and those of `others`: the position that leads each row."""
        size = block_size(centroid)
        where = np.stack(np.divmod(np.arange(n), size), axis=1)
        phi = Gatherer(blocks, where)
        count = len(others) + 1
        self.open_shard(phi.shape[1], epsilon, 0, count)
        ray.get([other.open_shard.remote(phi.shape[1], epsilon, i, count) for i, other in enumerate(others, 1)])

        def call(number: int, settled: Any) -> list[Any]:
            pending = [other.answer.remote(centroid, blocks[number], settled) for other in others]
            return [self.answer(centroid, ray.get(blocks[number]), settled), *ray.get(pending)]

        return find_sharded(phi, np.arange(n), epsilon, centroid, call, count)
