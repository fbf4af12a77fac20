"""The texts of ALFWorld games: textworld's grammar, parsed once and evaluated directly.

The stock engine parses a rule's text whenever it uses it, which is nine tenths of a step. Here a grammar becomes
nested functions of (facts, bindings). What they return is what textworld 1.7.0 prints, character for character.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

Query = tuple[tuple[str, tuple[str, ...]], ...]  # ((predicate, names of its arguments), ...), all to hold at once
Binding = Mapping[str, str]  # name in the grammar -> id of an entity


@dataclass(frozen=True, slots=True)
class Entity:
    """What the grammar's expressions may read of an object, receptacle, location or agent."""

    id: str
    name: str
    definite: str = "the"
    indefinite: str = "a"

    def __str__(self) -> str:
        return self.name


class Facts:
    """What is true now: predicate -> argument tuples, as textworld keeps it.

    A predicate that an action made false is also kept as ``not_<predicate>``, because the grammar asks for such.
    """

    def __init__(self, facts: Mapping[str, frozenset[tuple[str, ...]]], entities: Mapping[str, Entity]) -> None:
        self.true = {name: set(arguments) for name, arguments in facts.items()}
        self.entities = entities

    def apply(self, name: str, arguments: tuple[str, ...]) -> None:
        """Make ``name(*arguments)`` true; a `name` that starts with ``not_`` makes the rest of it false."""
        opposite = name.removeprefix("not_") if name.startswith("not_") else f"not_{name}"
        self.true.get(opposite, set()).discard(arguments)
        self.true.setdefault(name, set()).add(arguments)

    def matches(self, query: Query, bound: Binding) -> Iterator[dict[str, str]]:
        """Every way to bind the free names of `query`, in textworld's order. Two names never mean the same entity."""
        if not query:
            yield dict(bound)
            return
        (predicate, names), rest = query[0], query[1:]
        for arguments in sorted(self.true.get(predicate, ())):
            extended = dict(bound)
            if all(_bind(extended, name, value) for name, value in zip(names, arguments, strict=True)):
                yield from self.matches(rest, extended)


def _bind(bound: dict[str, str], name: str, value: str) -> bool:
    if name in bound:
        return bound[name] == value
    if value in bound.values():
        return False
    bound[name] = value
    return True


Piece = Callable[[Facts, Binding], str]


class _Rule(NamedTuple):
    condition: Query
    text: Piece


class ActionText(NamedTuple):
    """An action's command, as the player types it, and the answer once it is carried out."""

    command: Piece
    feedback: Piece


class Grammar:
    """The rules of one game text.

    Args:
        domain: the PDDL domain.
        text: rules and actions in textworld's notation. Its expressions are evaluated as Python, as textworld does,
            without builtins.
    """

    def __init__(self, domain: str, text: str) -> None:
        from textworld.envs.pddl.logic import GameLogic

        logic = GameLogic(domain, text)
        self._rules = {
            name: [_Rule(_query(rule.condition), self._sequence(rule.rhs)) for rule in rules]
            for name, rules in logic.grammar._rules.items()
        }
        self.actions = {
            name: ActionText(self._parse(action.template), self._parse(action.feedback_rule))
            for name, action in logic.actions.items()
        }
        self.intro = self._parse("#intro#")

    def _parse(self, text: str) -> Piece:
        from textworld.envs.pddl import textgen

        return self._sequence(textgen._parse_and_convert(text, rule_name="symbols"))

    def _sequence(self, symbols: list[Any]) -> Piece:
        pieces = [self._piece(symbol) for symbol in symbols]
        return lambda facts, bound: "".join(piece(facts, bound) for piece in pieces)

    def _piece(self, symbol: Any) -> Piece:
        """A function for one of textworld's parsed symbols, told apart by its class's name."""
        kind = type(symbol).__name__
        if kind == "TerminalSymbol":
            return lambda facts, bound: symbol.symbol
        if kind == "NonterminalSymbol":
            return lambda facts, bound: self._first_rule(symbol.symbol, facts, bound)
        if kind == "EvalSymbol":
            code = compile(symbol.expression.strip(), "<ALFWorld grammar>", "eval")
            return lambda facts, bound: str(
                eval(code, {"__builtins__": {}}, {name: facts.entities[i] for name, i in bound.items()})
            )
        if kind == "ConditionalSymbol":
            every = self._every(symbol)
            return lambda facts, bound: "".join(every(facts, bound))
        if kind == "ListSymbol":
            return self._list(self._every(symbol.symbol))
        raise ValueError(f"ALFWorld grammar: got a {kind}, which textworld 1.7.0 does not have")

    def _every(self, symbol: Any) -> Callable[[Facts, Binding], list[str]]:
        """One text per match of a conditional symbol."""
        piece, query = self._piece(symbol.expression), _query(symbol.given)
        return lambda facts, bound: [piece(facts, match) for match in facts.matches(query, bound)]

    def _list(self, every: Callable[[Facts, Binding], list[str]]) -> Piece:
        def enumerated(facts: Facts, bound: Binding) -> str:
            found = every(facts, bound)
            if not found:
                return self._first_rule("list_empty", facts, bound)
            if len(found) == 1:
                return found[0]
            separator = self._first_rule("list_separator", facts, bound)
            last = self._first_rule("list_last_separator", facts, bound)
            return separator.join(found[:-1]) + last + found[-1]

        return enumerated

    def _first_rule(self, name: str, facts: Facts, bound: Binding) -> str:
        for rule in self._rules.get(name, ()):
            if next(facts.matches(rule.condition, bound), None) is not None:
                return rule.text(facts, bound)
        raise ValueError(f"ALFWorld grammar: no rule of {name!r} applies")


@lru_cache(maxsize=1024)
def _query(text: str) -> Query:
    if not text:
        return ()
    from textworld.logic import Rule

    parts = Rule.parse_conjunctive_query(text).preconditions
    return tuple((part.name, tuple(parameter.name for parameter in part.parameters)) for part in parts)
