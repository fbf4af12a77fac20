"""WebShop (Yao et al., arXiv 2207.01206): buy what an instruction asks for, in a simulated shop, as text.

Our own engine over the original's data files. Pages, commands, goals, splits and the score follow the original's text
mode as verl-agent uses it: 15 turns, reward 10 for a purchase with score 1 and 0 everywhere else, observations without
the instruction. Different on purpose: no global random state, no shared sessions, and a malformed command never
resets anything. The products are not part of this package: see `openrlhf_bipace.data` for where they come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from openrlhf_bipace.envs.base import Observation, StepResult, TextEnv, check_keys, refuse
from openrlhf_bipace.envs.prompts import commands_text
from openrlhf_bipace.envs.webshop_catalogue import Catalogue, Goal, Product, load_catalogue
from openrlhf_bipace.envs.webshop_reward import score

SPLITS = ("train", "test")
TEST_GOALS = 500  # goals 0 to 499 are "test", as in the original
REWARD = 10.0
PER_PAGE = 10  # products on a page of results
QUERY_HINT = "search[<your query>]"  # stands in `admissible` for every search
THANKS = "Thank you for shopping with us!"

_KEYS = ("env", "task_id", "split", "visit_seed")
_refuse = partial(refuse, "webshop")

_COMMAND = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)
_SUB_PAGES = ("description", "features", "reviews")


@dataclass(frozen=True, slots=True)
class _Page:
    """Where the shopper is."""

    name: str = "search"  # search, results, item or one of _SUB_PAGES
    query: str = ""
    number: int = 1  # of the page of results
    asin: str = ""
    options: Mapping[str, str] = field(default_factory=dict)  # chosen so far: name -> value


class WebShopEnv(TextEnv):
    """Reward 10 with `success` for buying with score 1; every purchase ends the episode and `StepResult.score` says
    how much of the goal it met (`webshop_reward`).

    A task is ``{"env": "webshop", "task_id": 17, "split": "test"}``; "task_id" is a goal's number, in the original's
    order, and must belong to "split" (0 to 499 "test", the rest "train"); "visit_seed" is ignored. A command that is
    not understood or not possible here leaves the page as it is. As in the original, `search[...]` works on every
    page, and a page does not show which options are chosen.

    Args:
        data: folder with WebShop's files. Required.
    """

    thread_safe: ClassVar[bool] = True
    max_turns: ClassVar[int] = 15
    splits: ClassVar[tuple[str, ...]] = SPLITS
    instructions: ClassVar[str] = commands_text("webshop")

    def __init__(self, data: str = "") -> None:
        self._shop = load_catalogue(data)
        self._goal: Goal | None = None
        self._number = -1
        self._page = _Page()
        self._results: list[Product] = []

    @classmethod
    def tasks(cls, split: str, data: str = "", types: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """The split's goals in the original's order, of the given categories (all by default).

        ValueError for an unknown split or category.
        """
        shop = load_catalogue(data)
        numbers = cls._numbers(split, shop)
        known = {product.category for product in shop.products.values()}
        if not set(types) <= known:
            _refuse("types", types, f"one or several of {', '.join(sorted(known))}")
        wanted = set(types) or known
        chosen = [n for n in numbers if shop.products[shop.goals[n].asin].category in wanted]
        return [{"env": "webshop", "task_id": n, "split": split} for n in chosen]

    @classmethod
    def check_task(cls, task: dict[str, Any], data: str = "") -> None:
        """ValueError naming the key, what was got and what is allowed; counts the goals only if `data` is given."""
        check_keys("webshop", task, _KEYS)
        split, number = task.get("split"), task.get("task_id")
        numbers = cls._numbers(split, load_catalogue(data) if data else None)
        if not isinstance(number, int) or isinstance(number, bool) or number not in numbers:
            _refuse("task_id", number, f"a goal of the split {split!r}, {numbers.start} to {numbers.stop - 1}")

    @staticmethod
    def _numbers(split: Any, shop: Catalogue | None) -> range:
        if split not in SPLITS:
            _refuse("split", split, ", ".join(SPLITS))
        count = len(shop.goals) if shop else 10_000_000
        return range(min(TEST_GOALS, count)) if split == "test" else range(min(TEST_GOALS, count), count)

    def solution(self, task: dict[str, Any]) -> list[str]:
        """Find the goal's own product by its title, choose its options, buy."""
        goal = self._goal_of(task)
        title = self._shop.products[goal.asin].title
        page = [product.asin for product in self._shop.search(title)].index(goal.asin) // PER_PAGE
        clicks = ["next >"] * page + [goal.asin.lower(), *goal.options.values(), "buy now"]
        return [f"search[{title.lower()}]", *(f"click[{text}]" for text in clicks)]

    def task_type(self, task: dict[str, Any]) -> str:
        """The category of the goal's product."""
        return self._shop.products[self._goal_of(task).asin].category

    def _goal_of(self, task: dict[str, Any]) -> Goal:
        self.check_task(task)
        if task["task_id"] >= len(self._shop.goals):
            _refuse("task_id", task["task_id"], f"a goal of this shop, 0 to {len(self._shop.goals) - 1}")
        return self._shop.goals[task["task_id"]]

    def reset(self, task: dict[str, Any]) -> Observation:
        self._goal, self._number = self._goal_of(task), task["task_id"]
        self._page, self._results = _Page(), []
        return Observation(self._text(), self._goal.instruction, self._admissible(), self._state_id())

    def step(self, text: str) -> StepResult:
        """Carry out one command. Raises RuntimeError before the first `reset` and after the purchase."""
        if self._goal is None:
            raise RuntimeError("webshop: step called without a running episode; call reset first")
        match = _COMMAND.fullmatch(text.strip())
        verb, argument = (match[1], " ".join(match[2].lower().split())) if match else ("", "")
        if verb == "click" and argument == "buy now" and self._page.name == "item":
            return self._buy()
        moved = self._move(verb, argument)
        if moved is not None:
            self._page = moved
        executed = f"{verb}[{argument}]" if moved is not None else ""
        return StepResult(
            self._text(), 0.0, False, False, moved is not None, executed, self._admissible(), self._state_id()
        )

    def close(self) -> None:
        self._goal, self._page, self._results = None, _Page(), []

    @property
    def _product(self) -> Product:
        return self._shop.products[self._page.asin]

    def _buy(self) -> StepResult:
        got = score(self._goal, self._shop.products[self._goal.asin], self._product, self._page.options)
        won = got == 1.0
        state = self._state_id() + " bought"
        self.close()
        text = f"'{THANKS}' [SEP] 'Your score (min 0.0, max 1.0)' [SEP] '{got}'"
        return StepResult(text, REWARD if won else 0.0, True, won, True, "click[buy now]", [], state, got)

    def _move(self, verb: str, argument: str) -> _Page | None:
        """The page that the command leads to; None if it is not possible here."""
        page = self._page
        if not argument:
            return None
        if verb == "search":
            self._results = self._shop.search(argument)
            return _Page("results", argument)
        if verb != "click" or f"click[{argument}]" not in self._admissible():
            return None
        if argument == "back to search":
            self._results = []
            return _Page()
        if page.name == "results" and argument in ("next >", "< prev"):
            return replace(page, number=page.number + (1 if argument == "next >" else -1))
        if page.name == "results":
            return replace(page, name="item", asin=argument.upper())
        if argument == "< prev" and page.name == "item":
            return replace(page, name="results", asin="", options={})
        if argument == "< prev":
            return replace(page, name="item")
        if argument in _SUB_PAGES:
            return replace(page, name=argument)
        name = next(n for n, values in self._product.options.items() if argument in values)
        return replace(page, options={**page.options, name: argument})

    def _admissible(self) -> list[str]:
        if self._page.name == "search":
            return [QUERY_HINT]
        buttons = ["back to search"]
        if self._page.name == "results":
            buttons += [text.lower() for text in self._turns()] + [p.asin.lower() for p in self._on_page()]
        else:
            buttons.append("< prev")
        if self._page.name == "item":
            values = [value for every in self._product.options.values() for value in every]
            buttons += [*_SUB_PAGES, "buy now", *dict.fromkeys(values)]
        return [f"click[{text}]" for text in buttons]

    def _on_page(self) -> list[Product]:
        last = self._page.number * PER_PAGE
        return self._results[last - PER_PAGE : last]

    def _turns(self) -> list[str]:
        more = self._page.number * PER_PAGE < len(self._results)
        return ["< Prev"] * (self._page.number > 1) + ["Next >"] * more

    def _text(self) -> str:
        return " [SEP] ".join(f"'{part}'" for part in self._parts())

    def _parts(self) -> list[str]:
        """The page's visible texts, without the instruction."""
        page = self._page
        if page.name == "search":
            return ["Search"]
        if page.name == "results":
            lines = [part for p in self._on_page() for part in (p.asin, p.title, p.price_tag)]
            total = f"Page {page.number} (Total results: {len(self._results)})"
            return ["Back to Search", total, *self._turns(), *lines]
        product, head = self._product, ["Back to Search", "< Prev"]
        if page.name == "item":
            options = [part for name, values in product.options.items() for part in (name, *values)]
            facts = [product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}"]
            return [*head, *options, *facts, "Description", "Features", "Reviews", "Buy Now"]
        if page.name == "description":
            return [*head, product.description or "No Description"]
        return head + (list(product.features) if page.name == "features" else [])

    def _state_id(self) -> str:
        page = self._page
        chosen = ", ".join(f"{name}={value}" for name, value in sorted(page.options.items()))
        return f"goal {self._number} {page.name} {page.query!r} {page.number} {page.asin} {chosen}".rstrip()
