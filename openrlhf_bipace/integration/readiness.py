"""What we ask of a Ray cluster before training: that it is complete, and that it can hold what was asked.

``python -m openrlhf_bipace.integration.readiness --nodes 2 --gpus 16 --deadline 300`` waits for RAY_ADDRESS's cluster.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

UNAVAILABLE = 69  # exit code, as in slurm/lib/ray_node.sh
# What OpenRLHF's own ray.init passes on
HOST_VARIABLES = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}


def connect() -> None:
    """``ray.init`` as OpenRLHF calls it: the cluster RAY_ADDRESS names, else a local one."""
    import ray

    ray.init(runtime_env={"env_vars": {k: os.environ.get(k, default) for k, default in HOST_VARIABLES.items()}})


def counted(nodes: list[dict[str, Any]]) -> tuple[int, float, str]:
    """Alive nodes, their GPUs, and both in words, from ``ray.nodes()``."""
    alive = [n for n in nodes if n["Alive"]]
    gpus = [n["Resources"].get("GPU", 0) for n in alive]
    each = ", ".join(f"{n['NodeManagerAddress']}: {count:g}" for n, count in zip(alive, gpus, strict=True))
    return len(alive), sum(gpus), f"{len(alive)} nodes and {sum(gpus):g} GPUs ({each})"


def wait_for_nodes(nodes: int, gpus: int, deadline: float) -> str:
    """Until Ray counts `nodes` alive nodes with `gpus` GPUs in total; what it counts then.

    Raises TimeoutError, saying what was awaited and what is there, after `deadline` seconds.
    """
    import ray

    end = time.monotonic() + deadline
    while True:
        have, total, words = counted(ray.nodes())
        if have >= nodes and total >= gpus:
            return words
        if time.monotonic() > end:
            raise TimeoutError(f"after {deadline:g} s Ray counts {words}, awaited: {nodes} nodes and {gpus} GPUs")
        time.sleep(1)


def require_gpus(gpus: int, deadline: float) -> None:
    """Check that the connected cluster can hold `gpus` actors of one GPU and one CPU each.

    OpenRLHF waits for its placement groups without end. Here one group of the whole size is asked for (which also
    makes an autoscaler act), awaited for `deadline` seconds and given back. Raises RuntimeError naming both sizes.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if not gpus:
        return
    group = placement_group([{"GPU": 1, "CPU": 1}] * gpus, strategy="PACK")
    try:
        if group.wait(deadline):
            return
    finally:
        remove_placement_group(group)
    free, total = ray.available_resources(), ray.cluster_resources()
    there = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s free" for kind in ("GPU", "CPU"))
    raise RuntimeError(
        f"the flags ask for {gpus} GPUs with a CPU each; after {deadline:g} s the Ray cluster has {there} on "
        f"{counted(ray.nodes())[0]} nodes: ask for fewer (--actor.num_nodes, --vllm.num_engines, ...) or a larger "
        "allocation (bipace-train --dry_run shows the layout; --launch.deadline waits longer)"
    )


def main() -> None:
    """Wait for the cluster that RAY_ADDRESS names; exits with 69 and one line if it stays incomplete."""
    parser = argparse.ArgumentParser(description="Wait until the Ray cluster at RAY_ADDRESS is complete.")
    parser.add_argument("--nodes", type=int, required=True, help="alive nodes to wait for")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs to wait for, over all nodes")
    parser.add_argument("--deadline", type=float, default=300, help="seconds to wait")
    args = parser.parse_args()
    import ray

    try:
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
        print(f"bipace: Ray is complete: {wait_for_nodes(args.nodes, args.gpus, args.deadline)}", flush=True)
    except (TimeoutError, ConnectionError) as error:
        print(f"bipace: {error}", flush=True)
        sys.exit(UNAVAILABLE)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
