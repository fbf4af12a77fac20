"""WebShop's score of a purchase: how much of the goal it meets, between 0 and 1.

score = type x (attributes met + options met + price met) / (#attributes + #options + 1), as in the original
(Yao et al., arXiv 2207.01206, section 3), in whose own words the parts are:

- an attribute is met by one of the product's attributes that is nearly the same words (token set ratio above 85), or
  by standing in its title, features or description;
- a chosen option is met by a wanted one: the same value for "size", nearly the same words for the rest, or by standing
  in the product's text;
- the price is met by being no higher than the limit;
- type is 1 if product and goal come from the same search, share two categories or have similar titles, 0.5 if none of
  these, 0.1 if the titles share under a tenth of the goal's words, 0 if they share none.

The original compares the nouns of the two titles, found by a spaCy model, and colours by a table of base colours.
This compares all words of two letters or more that are not stop words, and colours as they are written: titles are
little else than nouns, and a score of 1 for the goal's own product is not touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from openrlhf_bipace.envs.webshop_catalogue import Goal, Product

_NEAR = 85  # token set ratio, of 100, above which two phrases are the same
_EXACT_OPTIONS = ("size",)
_WORD = re.compile(r"[a-z][a-z'-]+")


def score(goal: Goal, wanted: Product, bought: Product, options: Mapping[str, str]) -> float:
    """The score of buying `bought` with `options` (name -> value).

    Args:
        goal: what was asked for.
        wanted: the product that the goal was made from.
        bought: the product bought.
        options: what was chosen on its page.
    """
    met = attributes_met(goal, bought) + options_met(goal, bought, options) + (bought.price <= goal.price_limit)
    return type_score(wanted, bought) * met / (len(goal.attributes) + len(goal.options) + 1)


def attributes_met(goal: Goal, bought: Product) -> int:
    """How many of the goal's attributes the product has."""
    return sum(any(_near(own, a) for own in bought.attributes) or a in bought.text for a in goal.attributes)


def options_met(goal: Goal, bought: Product, options: Mapping[str, str]) -> int:
    """How many of the chosen `options` the goal asks for; never more than it asks for."""
    wanted = list(goal.options.values())
    met = 0
    for name, value in options.items():
        same = value in wanted if name in _EXACT_OPTIONS else any(_near(w, value) for w in wanted)
        met += same or value in bought.text
    return min(met, len(wanted))


def type_score(wanted: Product, bought: Product) -> float:
    """1, 0.5, 0.1 or 0: is it the kind of product that was asked for?"""
    asked = title_words(wanted.title)
    shared = len(asked & title_words(bought.title)) / len(asked) if asked else 0.2  # 0.2 as in the original
    if shared == 0:
        return 0.0
    if shared < 0.1:
        return 0.1
    categories = set(wanted.product_category) & set(bought.product_category)
    return 1.0 if wanted.query == bought.query or len(categories) >= 2 or shared > 0.2 else 0.5


def title_words(title: str) -> set[str]:
    """The words of a title that say what it is."""
    from bm25s.stopwords import STOPWORDS_EN

    return set(_WORD.findall(title.lower())).difference(STOPWORDS_EN)


def _near(first: str, second: str) -> bool:
    from rapidfuzz import fuzz, utils

    return round(fuzz.token_set_ratio(first, second, processor=utils.default_process)) > _NEAR
