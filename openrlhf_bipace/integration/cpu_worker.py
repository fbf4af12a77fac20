"""Weight sync without CUDA: a gloo group between the policy and vLLM's CPU workers, and the engine's half of it.

vLLM imports `CpuWorkerExtension` by name inside its engine process, so this module imports nothing heavy at the top.
"""

from __future__ import annotations

import datetime
from typing import Any

TIMEOUT = datetime.timedelta(minutes=10)  # on a loaded machine an engine takes minutes to start


class GlooCommunicator:
    """Stands where upstream uses PyNccl: one broadcast, outside torch's default process group."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        import torch.distributed as dist

        store = dist.TCPStore(host, port, world_size, rank == 0, timeout=TIMEOUT)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Overwrite `tensor` with rank `src`'s on every other rank."""
        flat = tensor.detach().contiguous()
        self._group.broadcast(flat, root=src).wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)


class CpuWorkerExtension:
    """vLLM worker methods that upstream's weight sync calls."""

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "gloo",
        use_ray: bool = False,
    ) -> None:
        """Join the policy's group. Only gloo works without CUDA."""
        import torch

        if backend != "gloo" or use_ray:
            got = f"{backend!r}, --vllm.sync_with_ray {use_ray}"
            raise ValueError(f"--vllm.sync_backend: got {got}, allowed without CUDA: 'gloo', without Ray")
        rank = torch.distributed.get_rank() + rank_offset
        self._policy_group = GlooCommunicator(master_address, master_port, rank, world_size)
        self._reloading = False

    def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        """Receive one weight. The first of a stream opens a layerwise reload, the last (`empty_cache`) closes it.

        vLLM repacks linear weights on CPU and drops their loaders, so a bare ``load_weights`` fails.
        """
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import reload

        if dtype != self.model_config.dtype:
            raise TypeError(f"weight {name}: the policy sends {dtype}, the engine holds {self.model_config.dtype}")
        weight = torch.empty(tuple(shape), dtype=dtype)
        self._policy_group.broadcast(weight, src=0)
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if not self._reloading:
                reload.initialize_layerwise_reload(model)
                self._reloading = True
            model.load_weights(weights=[(name, weight)])
            if empty_cache:
                reload.finalize_layerwise_reload(model, self.model_config)
                self._reloading = False
