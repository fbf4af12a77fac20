"""WebShop's products, goals and search, read from a folder that the user names. Immutable once loaded.

The files are the original's: ``items_shuffle*.json`` (products) and ``items_ins_v2*.json`` (their attributes and
instructions). Nothing of them is part of this package. Where the original draws at random, this draws the same for
every process: a price range counts as its middle, a goal's price limit is drawn by a generator of its product.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

FILES = {"products": "items_shuffle*.json", "instructions": "items_ins_v2*.json"}
RESULTS = 50  # products a search finds
NO_PRICE = 100.0  # of a product without one, as in the original
NO_LIMIT = 1_000_000.0  # a goal that names no price

_LIMITS = [10.0 * i for i in range(1, 100)]  # prices that a goal may name
_SHUFFLE_SEED = 233  # the original's
_K1, _B = 0.9, 0.4  # of BM25, Pyserini's defaults, which the original searches with


@dataclass(frozen=True, slots=True)
class Product:
    """One page of the shop."""

    asin: str  # upper case
    title: str
    description: str
    features: tuple[str, ...]
    price: float
    price_tag: str  # as the pages show it: "$12.5" or "$10.0 to $15.0"
    rating: str
    category: str
    query: str  # the search that its data were scraped with
    product_category: tuple[str, ...]  # from the widest category to the narrowest
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]  # name -> values, lower case, in the pages' order

    @property
    def text(self) -> str:
        """Title, features and description in lower case, where the reward also looks for attributes and options."""
        return "\n".join((self.title, " ".join(self.features), self.description)).lower()


@dataclass(frozen=True, slots=True)
class Goal:
    """What to buy."""

    asin: str  # of the product that it was made from
    instruction: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]  # name -> value
    price_limit: float


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """A loaded shop. `goals` are in the original's shuffled order, which its splits count in."""

    products: Mapping[str, Product]  # by asin
    goals: tuple[Goal, ...]
    _index: Any
    _asins: tuple[str, ...]

    def search(self, words: str) -> list[Product]:
        """The `RESULTS` best products for `words` by BM25, best first; equal scores in the catalogue's order.

        Products that share no word with the search are not found.
        """
        (query,) = _tokens([words.lower()])
        if not query:
            return []
        scores = self._index.get_scores(query)
        ranked = np.argsort(-scores, kind="stable")[:RESULTS]
        return [self.products[self._asins[i]] for i in ranked if scores[i] > 0]


def find_file(folder: Path, kind: str) -> Path:
    """The one file of `kind` ("products" or "instructions") in `folder`. ValueError if there is none, or several."""
    found = sorted(folder.glob(FILES[kind]))
    if len(found) != 1:
        got = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"webshop: data: got {str(folder)!r} with {got}, allowed: a folder with one {FILES[kind]}")
    return found[0]


def load_catalogue(data: str) -> Catalogue:
    """The shop in the folder `data`, cached per folder. ValueError naming what is missing or malformed."""
    if not data:
        raise ValueError("webshop: data: got '', allowed: a folder with WebShop's files (`bipace-data list` helps)")
    return _load(str(Path(data).expanduser().resolve()))


@lru_cache(maxsize=4)
def _load(folder: str) -> Catalogue:
    products_file, instructions_file = (find_file(Path(folder), kind) for kind in FILES)
    instructions = _read(instructions_file, dict)
    products: dict[str, Product] = {}
    goals: list[Goal] = []
    for number, raw in enumerate(_read(products_file, list)):
        try:
            asin = raw["asin"]
            if asin == "nan" or len(asin) > 10 or asin in products:
                continue  # as the original does
            extra = instructions.get(asin, {})
            products[asin] = _product(raw, extra)
            goals += _goals(products[asin], extra)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"{products_file}, record {number}: not a product of WebShop ({problem})") from error
    random.Random(_SHUFFLE_SEED).shuffle(goals)
    asins = tuple(products)
    return Catalogue(MappingProxyType(products), tuple(goals), _build_index(list(products.values())), asins)


def _read(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path}: got a {type(content).__name__}, allowed: a {kind.__name__}")
    return content


def _product(raw: dict[str, Any], extra: dict[str, Any]) -> Product:
    features = raw["small_description"]
    prices = [float(re.sub(r"[^\d.]", "", part)) for part in (raw.get("pricing") or "").split("$")[1:]][:2]
    options = {
        name.lower(): tuple(" ".join(v["value"].replace("/", " | ").lower().split()) for v in values)
        for name, values in (raw.get("customization_options") or {}).items()
        if values
    }
    return Product(
        asin=raw["asin"],
        title=raw["name"],
        description=raw["full_description"] or "",
        features=tuple(features) if isinstance(features, list) else (features,),
        price=sum(prices) / len(prices) if prices else NO_PRICE,
        price_tag=" to ".join(f"${price}" for price in prices or [NO_PRICE]),
        rating="N.A.",
        category=raw["category"],
        query=raw["query"].lower().strip(),
        product_category=tuple(part.strip() for part in raw["product_category"].split("›")),
        attributes=tuple(extra.get("attributes") or ()),
        options=MappingProxyType(options),
    )


def _goals(product: Product, extra: dict[str, Any]) -> list[Goal]:
    """One goal per combination of the product's options; none for a product without an instruction."""
    if not extra.get("instruction"):
        return []
    above = [limit for limit in _LIMITS if limit > product.price][:4]
    limit, priced = NO_LIMIT, ""
    if len(above) >= 2:
        # a string seed is hashed the same way in every process
        limit = max(random.Random(f"webshop {product.asin}").sample(above, 2))
        priced = f", and price lower than {limit:.2f} dollars"
    names = sorted(product.options)
    goals = []
    for values in itertools.product(*(product.options[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        wanted = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
        text = extra["instruction"] + (f" with {wanted}" if wanted else "") + priced
        goals.append(Goal(product.asin, text, tuple(extra["instruction_attributes"]), MappingProxyType(chosen), limit))
    return goals


def _tokens(texts: list[str]) -> list[list[str]]:
    """Stemmed words without stop words, as Lucene's English analyser makes them."""
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("porter")
    return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)


def _build_index(products: list[Product]) -> Any:
    """BM25 over what the original indexes: title, description, first feature and options."""
    import bm25s

    texts = []
    for product in products:
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
        texts.append(" ".join((product.title, product.description, *product.features[:1], options)).lower())
    index = bm25s.BM25(k1=_K1, b=_B, method="lucene")
    index.index(_tokens(texts), show_progress=False)
    return index
