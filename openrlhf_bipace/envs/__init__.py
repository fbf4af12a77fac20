"""Environments by name. Nothing is imported before it is asked for.

To add one: a file with a `TextEnv` subclass and one line in `_REGISTRY`.
"""

from __future__ import annotations

import importlib
from typing import Any

from openrlhf_bipace.envs.base import Observation, StepResult, TextEnv

__all__ = ["Observation", "StepResult", "TextEnv", "env_class", "make", "names"]

_REGISTRY = {
    "alfworld": "openrlhf_bipace.envs.alfworld:AlfworldEnv",
    "rooms": "openrlhf_bipace.envs.rooms:RoomsEnv",
    "textcraft": "openrlhf_bipace.envs.textcraft:TextCraftEnv",
    "webshop": "openrlhf_bipace.envs.webshop:WebShopEnv",
}


def names() -> list[str]:
    """Names `make` accepts."""
    return sorted(_REGISTRY)


def env_class(name: str) -> type[TextEnv]:
    """The class behind `name`. ValueError for an unknown name."""
    if name not in _REGISTRY:
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(names())}")
    module, _, attribute = _REGISTRY[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def make(name: str, **options: Any) -> TextEnv:
    """A fresh environment. `options` are the class's own (for instance ``data=<folder>``)."""
    return env_class(name)(**options)
