"""Environments by name or by file. Nothing is imported before it is asked for.

To add one: a file with a `TextEnv` subclass and one line in `_REGISTRY`. One outside the package needs no line: its
name is ``path/to/file.py:ClassName``.
"""

from __future__ import annotations

import importlib
from typing import Any

from openrlhf_bipace.envs import custom
from openrlhf_bipace.envs.base import Observation, StepResult, TextEnv

__all__ = ["Observation", "StepResult", "TextEnv", "absolute", "env_class", "make", "names"]

_REGISTRY = {
    "alfworld": "openrlhf_bipace.envs.alfworld:AlfworldEnv",
    "rooms": "openrlhf_bipace.envs.rooms:RoomsEnv",
    "textcraft": "openrlhf_bipace.envs.textcraft:TextCraftEnv",
    "webshop": "openrlhf_bipace.envs.webshop:WebShopEnv",
}


def names() -> list[str]:
    """Registered names. `env_class` and `make` also accept ``path/to/file.py:ClassName``."""
    return sorted(_REGISTRY)


def absolute(name: str) -> str:
    """`name`; a file's path made absolute, so that it means the same in every process."""
    return custom.absolute(name) if custom.is_path(name) else name


def env_class(name: str) -> type[TextEnv]:
    """The class behind `name`, a registered one or ``path/to/file.py:ClassName``. ValueError for an unknown name."""
    if custom.is_path(name):
        return custom.load(name)
    if name not in _REGISTRY:
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(names())}, or path/to/file.py:ClassName")
    module, _, attribute = _REGISTRY[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def make(name: str, **options: Any) -> TextEnv:
    """A fresh environment. `options` are the class's own (for instance ``data=<folder>``)."""
    return env_class(name)(**options)
