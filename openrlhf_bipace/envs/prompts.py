"""The user messages of an episode, as plain text. The chat template and the tokens come later, in `rollout`.

The words are in ``templates/``: a folder per template with `first.jinja`, `next.jinja` and `window.jinja`, and in
``templates/commands/`` what each environment says about its commands. ``react`` explains everything and asks for
``<think>…</think><action>…</action>``, the format of the BiPACE paper and of verl-agent. ``terse`` gives the bare
facts, for tiny models warm-started on the format. To add a template: a folder, and its name in `TEMPLATES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

TEMPLATES = ("react", "terse")
FOLDER = Path(__file__).parent / "templates"


def first_user(
    task: str,
    observation: str,
    *,
    instructions: str,
    template: str,
    admissible: Sequence[str],
    show_admissible: bool,
    max_turns: int,
) -> str:
    """The first user message: what to do, how to answer, what there is to see.

    `instructions` is the environment's own text on its commands ("" for none), `admissible` the commands it would
    accept now, listed if `show_admissible` and there are any, `max_turns` the turn cap (0: not mentioned). The texts
    go in as they are: braces or dollar signs in them mean nothing. ValueError for an unknown `template`.
    """
    return _render(
        template,
        "first",
        task=task,
        observation=observation,
        instructions=instructions.strip(),
        commands=list(admissible) if show_admissible else [],
        max_turns=max_turns,
    )


def next_user(task: str, observation: str, *, admissible: Sequence[str], show_admissible: bool, template: str) -> str:
    """Every later user message of a conversation: the new observation, and the admissible commands if asked for.

    ``terse`` repeats the task, because a tiny model learns to look back a few words, not a whole conversation.
    ValueError for an unknown `template`.
    """
    commands = list(admissible) if show_admissible else []
    return _render(template, "next", task=task, observation=observation, commands=commands)


def window_user(
    task: str,
    observation: str,
    *,
    history: Sequence[tuple[str, str]],
    turn: int,
    instructions: str,
    template: str,
    admissible: Sequence[str],
    show_admissible: bool,
    max_turns: int,
) -> str:
    """The only user message of a turn that does not see the conversation: rules, the last turns, what there is to see.

    `history` holds (observation, command) of the last turns, oldest first, `turn` counts the turns taken so far. The
    rest is as in `first_user`, which this equals at turn 0. ValueError for an unknown `template` or more history than
    turns.
    """
    if len(history) > turn:
        raise ValueError(f"history: got {len(history)} turns, allowed after {turn}: at most {turn}")
    return _render(
        template,
        "window",
        task=task,
        observation=observation,
        history=list(history),
        instructions=instructions.strip(),
        commands=list(admissible) if show_admissible else [],
        max_turns=max_turns,
        turn=turn,
    )


def commands_text(env: str) -> str:
    """What the registered environment `env` says about its commands, for its `instructions`."""
    return (FOLDER / "commands" / f"{env}.txt").read_text(encoding="utf-8").strip()


def _render(template: str, message: str, **values: Any) -> str:
    if template not in TEMPLATES:
        raise ValueError(f"template: got {template!r}, allowed: {' | '.join(TEMPLATES)}")
    return _library().get_template(f"{template}/{message}.jinja").render(values)


@lru_cache(maxsize=1)
def _library() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
