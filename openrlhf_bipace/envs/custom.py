"""Environments from a user's own file: ``path/to/file.py:ClassName``, or ``path/to/file.py`` if it has one only."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from openrlhf_bipace.envs.base import TextEnv


def is_path(name: str) -> bool:
    """Does `name` name a Python file rather than a registered environment?"""
    return _split(name)[0].endswith(".py")


def absolute(name: str) -> str:
    """`name` with an absolute path."""
    path, separator, cls = _split(name)
    return f"{Path(path).expanduser().absolute()}{separator}{cls}"


def load(name: str) -> type[TextEnv]:
    """The class that `name` stands for. ValueError when there is no such file or class, or several and none is named.

    What the file raises while it is imported goes through.
    """
    path, _, wanted = _split(absolute(name))
    if not Path(path).is_file():
        raise ValueError(f"environment {name!r}: there is no file {path}")
    module = _module(path)
    found = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, TextEnv) and value.__module__ == module.__name__
    }
    choices = ", ".join(found) or "none"
    if not wanted:
        if len(found) != 1:
            raise ValueError(f"environment {name!r}: the file has {len(found)} TextEnv classes ({choices}), name one")
        (cls,) = found.values()
    elif wanted not in found:
        raise ValueError(f"environment {name!r}: {wanted} is no TextEnv class of the file; it defines: {choices}")
    else:
        cls = found[wanted]
    if inspect.isabstract(cls):
        raise ValueError(f"environment {name!r}: {cls.__name__} lacks {', '.join(sorted(cls.__abstractmethods__))}")
    return cls


def _split(name: str) -> tuple[str, str, str]:
    head, separator, tail = name.rpartition(":")
    return (head, separator, tail) if head.endswith(".py") else (name, "", "")


@cache
def _module(path: str) -> ModuleType:
    """The file as a module under a name of its own; modules beside it can be imported by it."""
    module_name = f"bipace_env_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[module_name] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
