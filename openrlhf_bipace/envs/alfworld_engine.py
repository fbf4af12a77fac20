"""Plays ALFWorld games with textworld's planner library, faster than textworld and with the same transcripts.

What does not change is kept: the translated problem of a game, the parsed grammar, the command of an operator.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from openrlhf_bipace.envs.alfworld_text import Entity, Facts, Grammar

NOTHING = "Nothing happens."
GAMES_KEPT = 64  # translated games a process keeps, about 1 MB each
_INSTALL = "pip install openrlhf_bipace[alfworld]"
NEEDED = {"alfworld": "0.4.2", "textworld": "1.7.0"}

# A task's words, where they are plain enough for the grammar to be parsed once and serve every game.
_TASK = re.compile(r'"rhs": "(Your task is to: [\w ,.\'-]+)"')
_TASK_MARK = "Your task is to: TASK"
_idle: list[Any] = []  # planner libraries that no player holds; unloading one crashes the process at its end
_translation = threading.Lock()  # fast-downward's translator works through module globals, sys.argv and sys.stdout


@dataclass(slots=True)
class Game:
    """A game file made ready to play. Shared by the episodes of a process."""

    sas: bytes  # the problem in the planner's language
    facts: dict[str, frozenset[tuple[str, ...]]]  # true at the start
    entities: dict[str, Entity]
    parameters: dict[str, tuple[str, ...]]  # action -> names of its arguments in the grammar
    changing: tuple[str, ...]  # predicates that actions change and that decide what can happen next
    grammar: Grammar
    task: str  # the goal in words, with "Your task is to: " before it
    digest: bytes  # of the problem, goal included
    commands: dict[str, str] = field(default_factory=dict)  # operator -> command, as they come up


def check_installed() -> None:
    """ModuleNotFoundError or ImportError that says what to install, unless the needed versions are there."""
    for package, needed in NEEDED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ModuleNotFoundError(f"ALFWorld needs {package}=={needed}: {_INSTALL}") from None
        if found != needed:
            raise ImportError(f"ALFWorld needs {package}=={needed}, got {found}: {_INSTALL}")


def read_game(path: str | Path) -> dict[str, Any]:
    """The content of a ``game.tw-pddl``. ValueError naming `path` for anything else."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        missing = [key for key in ("pddl_domain", "grammar", "pddl_problem") if not isinstance(raw.get(key), str)]
        if missing:
            raise ValueError(f"no {', '.join(missing)} in it")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"alfworld: game: got {str(path)!r}, allowed: a game.tw-pddl file ({error})") from error
    return raw


@lru_cache(maxsize=GAMES_KEPT)
def load_game(path: str) -> Game:
    """The game in `path`, an absolute path, ready to play. ValueError for a file that is no game."""
    from alfworld.agents.utils.misc import Demangler

    raw = read_game(path)
    task, sas = _translate(raw["pddl_domain"], raw["pddl_problem"])
    facts: dict[str, set[tuple[str, ...]]] = {}
    for atom in task.init:
        if getattr(atom, "predicate", "=") != "=":  # leaves out costs and equalities
            facts.setdefault(atom.predicate, set()).add(tuple(atom.args))
    ids = {argument for every in facts.values() for arguments in every for argument in arguments}
    names = Demangler(game_infos={i: Entity(i, i) for i in ids})
    effects = {effect.literal.predicate for action in task.actions for effect in action.effects}
    found = _TASK.search(raw["grammar"])
    words = found[1] if found else ""
    return Game(
        sas=sas.encode(),
        facts={name: frozenset(arguments) for name, arguments in facts.items()},
        entities={i: Entity(i, names.demangle_alfred_name(i)) for i in sorted(ids)},
        parameters={a.name: tuple(p.name.strip("?") for p in a.parameters) for a in task.actions},
        changing=tuple(sorted(effects - {"checked"})),  # "checked" is bookkeeping: no action and no goal asks for it
        grammar=_grammar(raw["pddl_domain"], raw["grammar"].replace(words, _TASK_MARK) if words else raw["grammar"]),
        task=words,
        digest=hashlib.blake2b(raw["pddl_problem"].encode(), digest_size=16).digest(),
    )


@lru_cache(maxsize=8)
def _grammar(domain: str, text: str) -> Grammar:
    return Grammar(domain, text)


def _translate(domain: str, problem: str) -> tuple[Any, str]:
    import fast_downward

    with _translation:
        arguments = sys.argv
        try:
            return fast_downward.pddl2sas(domain, problem)
        finally:
            sys.argv = arguments


class Player:
    """One game in play. Holds a copy of the planner library until `close`, which leaves it to the next player."""

    def __init__(self) -> None:
        import fast_downward

        self._planner = fast_downward
        try:
            self._library = _idle.pop()
        except IndexError:
            self._library = fast_downward.load_lib()

    def start(self, game: Game) -> str:
        """Begin `game`; the introduction."""
        self._game = game
        self._library.load_sas(game.sas)
        self._facts = Facts(game.facts, game.entities)
        self._look_up_operators()
        return game.grammar.intro(self._facts, {}).replace(_TASK_MARK, game.task)

    def act(self, command: str) -> str:
        """Carry out `command`, exactly one of `admissible`; what is printed. Any other text changes nothing."""
        operator = self._operators.get(command)
        if operator is None:
            return NOTHING
        effects = (self._planner.Atom * operator.nb_effect_atoms)()
        self._library.apply_operator(operator.id, effects)
        for effect in effects:
            self._facts.apply(*_fact(effect.name))
        action, bound = self._binding(operator.name)
        printed = self._game.grammar.actions[action].feedback(self._facts, bound)
        self._look_up_operators()
        return printed

    @property
    def admissible(self) -> list[str]:
        """Every command that does something now, sorted."""
        return sorted(self._operators)

    @property
    def won(self) -> bool:
        """Is the goal reached?"""
        return bool(self._library.check_goal())

    @property
    def state_id(self) -> str:
        """Hash of the problem and of all that is true now and can change: equal ids have the same future."""
        digest = hashlib.blake2b(self._game.digest, digest_size=16)
        true = self._facts.true
        digest.update(repr([(name, sorted(true.get(name, ()))) for name in self._game.changing]).encode())
        return digest.hexdigest()

    def close(self) -> None:
        """Give the library back. The player cannot be used afterwards."""
        _idle.append(self._library)
        del self._library

    def _look_up_operators(self) -> None:
        found = (self._planner.Operator * self._library.get_applicable_operators_count())()
        self._library.get_applicable_operators(found)
        self._operators: dict[str, Any] = {}
        for operator in found:  # of several operators with one command, textworld takes the first
            self._operators.setdefault(self._command(operator.name), operator)

    def _command(self, operator: str) -> str:
        """What to type for `operator`. Names and places of receptacles are all a command says; they never change."""
        known = self._game.commands
        if operator not in known:
            action, bound = self._binding(operator)
            known[operator] = self._game.grammar.actions[action].command(self._facts, bound)
        return known[operator]

    def _binding(self, operator: str) -> tuple[str, dict[str, str]]:
        action, *arguments = operator.split()
        return action, dict(zip(self._game.parameters[action], arguments, strict=False))


@lru_cache(maxsize=1 << 16)
def _fact(atom: str) -> tuple[str, tuple[str, ...]]:
    """``Atom opened(x)`` as ("opened", ("x",)), ``NegatedAtom opened(x)`` as ("not_opened", ("x",))."""
    kind, _, rest = atom.partition(" ")
    name, _, arguments = rest.partition("(")
    prefix = "not_" if kind == "NegatedAtom" else ""
    return prefix + name, tuple(part for part in arguments[:-1].split(", ") if part)
