"""What lets the unmodified OpenRLHF run without CUDA: real Ray, DeepSpeed on gloo, vLLM's CPU build.

`install` is cheap: it only notes what to adjust, each adjustment happens right after its module is imported, so
nothing heavy is loaded early. It runs in the driver and, through Ray's worker hook, in every worker before its first
import.
``python -m openrlhf_bipace.integration.cpu MODULE ARGS...`` runs any OpenRLHF command line that way.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

WORKER_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One process per engine instead of two that poll each other. vLLM wants two so that it can set OpenMP's variables,
    # which are set here.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
DTYPE_VARIABLE = "BIPACE_CPU_DTYPE"

# OpenRLHF's defaults that name CUDA software, and what stands in for them
DEFAULTS = {
    "--ds.attn_implementation": "sdpa",
    "--vllm.sync_backend": "gloo",
    "--actor.num_gpus_per_node": 1,
    "--ref.num_gpus_per_node": 1,
    "--vllm.enforce_eager": True,
}
ROLLOUT_ARGUMENTS = {
    "worker_extension_cls": "openrlhf_bipace.integration.cpu_worker.CpuWorkerExtension",
    "enable_sleep_mode": False,
    "gpu_memory_utilization": 0.1,
    "block_size": 32,
    # A seeded request whose prompt is split rewinds its generator, which CPU generators cannot: the engine would die.
    "enable_chunked_prefill": False,
}


def needed() -> bool:
    """No CUDA device is visible."""
    import torch

    return not torch.cuda.is_available()


def uses_fp32() -> bool:
    """Parameters are fp32 (the default without CUDA) rather than --ds.param_dtype."""
    return os.environ.get(DTYPE_VARIABLE, "fp32") == "fp32"


def install() -> None:
    """Adjust the host in this process. Safe to call twice."""
    os.environ.update({k: v for k, v in WORKER_ENVIRONMENT.items() if k not in os.environ})
    if any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        return
    if importlib.util.find_spec("flash_attn") is None:
        from openrlhf_bipace.integration import flash_attn_cpu

        flash_attn_cpu.install()
    pending = dict(ADJUSTMENTS)
    for name in list(pending):
        if name in sys.modules:
            pending.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(pending))


def rollout_arguments() -> dict[str, Any]:
    """Arguments of the vLLM actor that upstream hard-codes for CUDA."""
    return {**ROLLOUT_ARGUMENTS, **({"dtype": "float32"} if uses_fp32() else {})}


def start_ray(devices: int) -> None:
    """Start a private Ray instance that declares `devices` GPUs, or join the one RAY_ADDRESS names.

    OpenRLHF places its actors by GPU; a declared GPU is a slot, nothing more.
    """
    import ray

    variables = {k: os.environ[k] for k in (*WORKER_ENVIRONMENT, DTYPE_VARIABLE, "HF_HUB_OFFLINE") if k in os.environ}
    runtime = {"env_vars": variables, "worker_process_setup_hook": "openrlhf_bipace.integration.cpu.install"}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], runtime_env=runtime)
        return
    folder = tempfile.mkdtemp(prefix="bp-")  # short: Ray's socket paths are limited to 107 characters
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=devices + 4,
        num_gpus=devices,
        include_dashboard=False,
        object_store_memory=512 * 2**20,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
        runtime_env=runtime,
    )

    def stop() -> None:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)


class _AfterImport:
    """Runs a function on a module right after it was first imported, so that ``from m import f`` sees the result."""

    def __init__(self, pending: dict[str, Callable]) -> None:
        self._pending = pending

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        adjust = self._pending.pop(name, None)
        if adjust is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            adjust(module)

        spec.loader.exec_module = exec_module
        return spec


def _adjust_torch(torch: Any) -> None:
    """OpenRLHF calls these without asking for CUDA first."""
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *args: None
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)


def _adjust_mesh(module: Any) -> None:
    real = module.init_device_mesh
    module.init_device_mesh = lambda device, *args, **kwargs: real("cpu", *args, **kwargs)


def _adjust_deepspeed_config(module: Any) -> None:
    """torch's AdamW (DeepSpeed would compile its own for a minute), and fp32 where wanted."""

    def wrap(make: Callable) -> Callable:
        def config(*args: Any, **kwargs: Any) -> dict:
            made = make(*args, **kwargs)
            if made.get("optimizer", {}).get("type") == "AdamW":
                made["optimizer"]["params"]["torch_adam"] = True
            if uses_fp32():
                made["bf16"]["enabled"] = made["fp16"]["enabled"] = False
            return made

        return config

    module.get_train_ds_config = wrap(module.get_train_ds_config)
    module.get_eval_ds_config = wrap(module.get_eval_ds_config)


def _adjust_dtype(module: Any) -> None:
    import torch

    if uses_fp32():
        module.convert_to_torch_dtype = lambda name: torch.float32


def _adjust_replay_buffer(module: Any) -> None:
    """It builds "cuda:<current device>" strings."""
    real = module.torch

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def device(self, name: Any) -> Any:
            return real.device("cpu") if str(name).startswith("cuda") else real.device(name)

    module.torch = Torch()


def _adjust_weight_sync(module: Any) -> None:
    from openrlhf_bipace.integration.cpu_worker import GlooCommunicator

    def join(host: str, port: int, rank: int, world_size: int, device: Any) -> GlooCommunicator:
        return GlooCommunicator(host, port, rank, world_size)

    module.stateless_init_process_group = join


def _adjust_deepspeed_comm(module: Any) -> None:
    """DeepSpeed would compile a shared-memory collective for a minute in every fresh cache."""
    module.build_shm_op = lambda: None


ADJUSTMENTS: dict[str, Callable] = {
    "torch": _adjust_torch,
    "deepspeed.comm.torch": _adjust_deepspeed_comm,
    "openrlhf.utils.utils": _adjust_dtype,
    "openrlhf.utils.distributed_util": _adjust_weight_sync,
    "openrlhf.utils.deepspeed.deepspeed_utils": _adjust_deepspeed_config,
    "openrlhf.utils.deepspeed.deepspeed": _adjust_mesh,
    "openrlhf.trainer.ppo_utils.replay_buffer": _adjust_replay_buffer,
}


def _main() -> None:
    import runpy

    from openrlhf_bipace.integration import host

    install()
    module, sys.argv = sys.argv[1], sys.argv[1:]
    host.install_rollout(None, rollout_arguments())
    start_ray(devices=8)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
