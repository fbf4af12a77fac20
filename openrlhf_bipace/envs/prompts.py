"""The user messages of an episode, as plain text. The chat template and the tokens come later, in `rollout`.

Two templates. ``react`` explains everything and asks for ``<think>…</think><action>…</action>``, the format of the
BiPACE paper and of verl-agent. ``terse`` gives the bare facts, for tiny models warm-started on the format.
To add one: a function of the same arguments as `_react_first`, and a line in `_FIRST`, `_NEXT` and `_WINDOW`.
"""

from __future__ import annotations

from collections.abc import Sequence


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

    `instructions` is the environment's own sentence on its commands ("" for none), `admissible` the commands it would
    accept now, listed if `show_admissible` and there are any, `max_turns` the turn cap (0: not mentioned). The texts
    go in as they are: braces or dollar signs in them mean nothing. ValueError for an unknown `template`.
    """
    compose = _choose(_FIRST, template)
    return compose(task, observation, instructions, list(admissible) if show_admissible else [], max_turns)


def next_user(task: str, observation: str, *, admissible: Sequence[str], show_admissible: bool, template: str) -> str:
    """Every later user message: the new observation, and the admissible commands if they are to be shown.

    ``terse`` repeats the task, because a tiny model learns to look back a few words, not a whole conversation.
    ValueError for an unknown `template`.
    """
    return _choose(_NEXT, template)(task, observation, list(admissible) if show_admissible else [])


def window_user(
    task: str,
    observation: str,
    history: Sequence[tuple[str, str]],
    *,
    instructions: str,
    template: str,
    admissible: Sequence[str],
    show_admissible: bool,
    turn: int,
    max_turns: int,
) -> str:
    """The only user message of a turn under ``--agent.context window``: everything the policy needs, in one prompt.

    `history` holds (observation, action) of the last turns, oldest first, `turn` counts from 0; with an empty history
    the message is `first_user`'s. The others as in `first_user`. ValueError for an unknown `template`.
    """
    compose = _choose(_WINDOW, template)
    commands = list(admissible) if show_admissible else []
    return compose(task, observation, history, instructions, commands, turn, max_turns)


def _react_first(task: str, observation: str, instructions: str, commands: list[str], max_turns: int) -> str:
    limit = f" You have at most {max_turns} turns." if max_turns else ""
    rules = f"{instructions.strip()}\n\n" if instructions.strip() else ""
    return (
        f"You are an agent in a text environment. Each turn you give one command and read what it leads to.{limit}\n\n"
        f"Your task: {task}\n\n"
        f"{rules}"
        "Answer every turn in this format: first reason step by step about the situation inside <think> </think>, "
        "then give exactly one command inside <action> </action>, and write nothing after it.\n\n"
        f"{_react_next(task, observation, commands)}"
    )


def _react_next(task: str, observation: str, commands: list[str]) -> str:
    shown = f"\n\nAdmissible commands: {'; '.join(commands)}" if commands else ""
    return f"Observation:\n{observation}{shown}"


def _terse_first(task: str, observation: str, instructions: str, commands: list[str], max_turns: int) -> str:
    return _terse_next(task, observation, commands)


def _terse_next(task: str, observation: str, commands: list[str]) -> str:
    shown = f"\ncommands : {' ; '.join(commands)}" if commands else ""
    return f"{observation}{shown}\ntask : {task}"


def _react_window(
    task: str,
    observation: str,
    history: Sequence[tuple[str, str]],
    instructions: str,
    commands: list[str],
    turn: int,
    max_turns: int,
) -> str:
    now = observation
    if history:
        lines = [
            f"Observation {i}:\n{seen}\nCommand {i}: {done or '(none: the answer was not in the format)'}"
            for i, (seen, done) in enumerate(history, turn - len(history) + 1)
        ]
        lines = [f"You have taken {turn} turns so far; the last {len(history)}:", *lines]
        now = "\n".join([*lines, f"Observation {turn + 1}:", observation])
    return _react_first(task, now, instructions, commands, max_turns)


def _terse_window(
    task: str,
    observation: str,
    history: Sequence[tuple[str, str]],
    instructions: str,
    commands: list[str],
    turn: int,
    max_turns: int,
) -> str:
    past = "".join(f"{seen}\n{done}\n" for seen, done in history)
    return past + _terse_next(task, observation, commands)


_FIRST = {"react": _react_first, "terse": _terse_first}
_NEXT = {"react": _react_next, "terse": _terse_next}
_WINDOW = {"react": _react_window, "terse": _terse_window}


def _choose(table: dict, template: str):
    if template not in table:
        raise ValueError(f"template: got {template!r}, allowed: {' | '.join(table)}")
    return table[template]
