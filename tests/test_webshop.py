"""WebShop: pages, goals, prices, search and score on a made-up shop; the real catalogue where it is here."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrlhf_bipace.envs import make
from openrlhf_bipace.envs.webshop import QUERY_HINT, WebShopEnv
from openrlhf_bipace.envs.webshop_catalogue import load_catalogue
from openrlhf_bipace.lab.demonstrators import forgetful

pytest.importorskip("bm25s", reason="pip install openrlhf_bipace[webshop]")
pytest.importorskip("rapidfuzz", reason="pip install openrlhf_bipace[webshop]")
pytest.importorskip("Stemmer", reason="pip install openrlhf_bipace[webshop]")

from openrlhf_bipace.envs import webshop_reward as reward


def product(asin, name, price, **more):
    """A record as WebShop's file has it."""
    return {
        "asin": asin,
        "name": name,
        "pricing": price,
        "full_description": "",
        "small_description": [],
        "customization_options": "",
        "product_category": "Garden › Tools",
        "category": "garden",
        "query": "Tools ",
        **more,
    }


OPTIONS = {"Color": [{"value": "Red"}, {"value": "Navy/Blue"}], "Size": [{"value": " Small "}, {"value": "Large"}]}
PRODUCTS = [
    product("B000000001", "Green Garden Hose", "$19.99 - $30.01", full_description="A hose that never kinks."),
    product(
        "B000000002", "Rain Coat for Gardeners", "$44.0", customization_options=OPTIONS, small_description=["Dry."]
    ),
    product("B000000003", "Clay Flower Pot", "", product_category="Home › Decor", query="pots", category="home"),
    *(product(f"B0000001{n:02}", f"Shovel number {n} with Handle", f"${n}.5", query="shovels") for n in range(11, 24)),
    product("nan", "Broken record", "$1.0"),
    product("B000000001", "Second record of the hose", "$1.0"),
]
INSTRUCTIONS = {
    "B000000001": {
        "attributes": ["kink free", "easy to store"],
        "instruction": "Find me a kink free hose",
        "instruction_attributes": ["kink free"],
    },
    "B000000002": {
        "attributes": ["water proof"],
        "instruction": "Find me a water proof coat",
        "instruction_attributes": ["water proof"],
    },
    "B000000003": {"attributes": []},
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with a made-up catalogue."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "items_shuffle_16.json").write_text(json.dumps(PRODUCTS))
    (folder / "items_ins_v2_16.json").write_text(json.dumps(INSTRUCTIONS))
    return str(folder)


@pytest.fixture
def env(shop):
    return make("webshop", data=shop)


def goal_number(shop, asin, **options):
    """The number of the goal for a product and options."""
    goals = load_catalogue(shop).goals
    return next(n for n, g in enumerate(goals) if g.asin == asin and dict(g.options) == options)


def enter(env, shop, asin="B000000002", **options):
    """Begin the episode of a goal; its first observation."""
    options = options or ({"color": "red", "size": "large"} if asin == "B000000002" else {})
    return env.reset({"task_id": goal_number(shop, asin, **options), "split": "test"})


# --- the catalogue


def test_products_goals_and_prices(shop):
    catalogue = load_catalogue(shop)
    assert len(catalogue.products) == 16 and "nan" not in catalogue.products
    hose, coat, pot = (catalogue.products[f"B00000000{n}"] for n in (1, 2, 3))
    assert (hose.title, hose.price, hose.price_tag) == ("Green Garden Hose", 25.0, "$19.99 to $30.01")  # the middle
    assert (pot.price, pot.price_tag) == (100.0, "$100.0")  # none given
    assert dict(coat.options) == {"color": ("red", "navy | blue"), "size": ("small", "large")}
    assert len(catalogue.goals) == 1 + 4 and len({g.instruction for g in catalogue.goals}) == 5
    by_hand = next(g for g in catalogue.goals if dict(g.options) == {"color": "navy | blue", "size": "small"})
    limit = by_hand.price_limit
    assert limit in (60.0, 70.0, 80.0)  # the higher of two drawn from 50, 60, 70, 80
    assert by_hand.instruction == (
        "Find me a water proof coat with color: navy | blue, and size: small, "
        f"and price lower than {limit:.2f} dollars"
    )
    assert {g.price_limit for g in catalogue.goals if g.asin == coat.asin} == {limit}  # drawn once per product


def test_search_stems_ranks_and_stops_at_fifty(shop):
    catalogue = load_catalogue(shop)
    assert [p.asin for p in catalogue.search("HOSES for the garden")][0] == "B000000001"
    assert len(catalogue.search("shovel")) == 13 and catalogue.search("the") == catalogue.search("zebra") == []
    assert catalogue.search("navy")[0].asin == "B000000002"  # options are searched too
    alike = [p.asin for p in catalogue.search("handle")]
    assert alike == sorted(alike)  # equal scores: the catalogue's order


def test_a_price_out_of_range_names_no_limit(tmp_path):
    record = product("B000000009", "Golden Bench", "$995.0")
    (tmp_path / "items_shuffle.json").write_text(json.dumps([record]))
    ins = {"B000000009": {"attributes": ["gold"], "instruction": "Find me gold", "instruction_attributes": ["gold"]}}
    (tmp_path / "items_ins_v2.json").write_text(json.dumps(ins))
    (goal,) = load_catalogue(str(tmp_path)).goals
    assert goal.instruction == "Find me gold" and goal.price_limit == 1_000_000


# --- pages


def test_an_episode_word_for_word(env, shop):
    seen = enter(env, shop)
    assert seen.task.startswith("Find me a water proof coat with color: red, and size: large, and price lower than")
    assert seen.text == "'Search'" and seen.admissible == [QUERY_HINT]
    results = env.step("search[Rain coat]")
    assert results.text == (
        "'Back to Search' [SEP] 'Page 1 (Total results: 1)' [SEP] "
        "'B000000002' [SEP] 'Rain Coat for Gardeners' [SEP] '$44.0'"
    )
    assert (
        results.admissible == ["click[back to search]", "click[b000000002]"]
        and results.executed == "search[rain coat]"
    )
    item = env.step("click[B000000002]")
    assert item.text == (
        "'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'red' [SEP] 'navy | blue' [SEP] 'size' [SEP] 'small' "
        "[SEP] 'large' [SEP] 'Rain Coat for Gardeners' [SEP] 'Price: $44.0' [SEP] 'Rating: N.A.' [SEP] 'Description' "
        "[SEP] 'Features' [SEP] 'Reviews' [SEP] 'Buy Now'"
    )
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert item.admissible == [f"click[{text}]" for text in [*buttons, "red", "navy | blue", "small", "large"]]
    for page, text in (("description", "'No Description'"), ("features", "'Dry.'")):
        assert env.step(f"click[{page}]").text == f"'Back to Search' [SEP] '< Prev' [SEP] {text}"
        assert env.step("click[< prev]").text == item.text
    chosen = env.step(" click[ RED ]\n")
    assert chosen.text == item.text and chosen.executed == "click[red]" and chosen.state_id != item.state_id
    env.step("click[large]")
    bought = env.step("click[Buy Now]")
    assert (bought.reward, bought.done, bought.success, bought.score) == (10.0, True, True, 1.0)
    assert bought.text.startswith("'Thank you for shopping with us!'")


def test_pages_of_results(env, shop):
    enter(env, shop)
    first = env.step("search[shovel]")
    assert "Page 1 (Total results: 13)" in first.text and "click[next >]" in first.admissible
    assert "click[< prev]" not in first.admissible and len(first.admissible) == 2 + 10
    second = env.step("click[next >]")
    assert "Page 2 (Total results: 13)" in second.text and len(second.admissible) == 2 + 3
    assert not env.step("click[next >]").valid
    item = env.step(second.admissible[-1])
    assert "'Shovel number" in item.text
    assert env.step("click[< prev]").text == second.text
    assert env.step("click[< prev]").text == first.text
    assert env.step("click[back to search]").text == "'Search'"


def test_going_back_forgets_the_options_and_choosing_again_replaces(env, shop):
    enter(env, shop)
    env.step("search[coat]")
    bare = env.step("click[b000000002]").state_id
    red = env.step("click[red]").state_id
    assert env.step("click[navy | blue]").state_id != red and env.step("click[red]").state_id == red
    env.step("click[< prev]")
    assert env.step("click[b000000002]").state_id == bare


@pytest.mark.parametrize(
    "command",
    [
        "",
        "buy",
        "click[]",
        "search[]",
        "search[ ]",
        "click[search]",
        "click[buy now]",
        "click[b000000001]",
        "fly[away]",
    ]
    + ["click[<your query>]", "search coat", "click[red] please", "click[next >]"],
)
def test_an_impossible_command_changes_nothing(env, shop, command):
    enter(env, shop)
    before = env.step("search[coat]")
    after = env.step(command)
    assert (after.text, after.state_id, after.admissible) == (before.text, before.state_id, before.admissible)
    assert (after.valid, after.executed, after.reward, after.done) == (False, "", 0.0, False)


def test_search_works_on_every_page_and_brackets_are_words(env, shop):
    enter(env, shop)
    env.step("search[coat]")
    env.step("click[b000000002]")
    assert env.step("search[[green] hose (garden)]").text.count("B000000001") == 1
    assert "Total results: 0" in env.step("search[zebra]").text


# --- the score, by hand: type x (attributes + options + price) / (#attributes + #options + 1)


def score_of(shop, wanted="B000000002", bought="B000000002", limit=60.0, **options):
    catalogue = load_catalogue(shop)
    goal = catalogue.goals[
        goal_number(shop, wanted, **({"color": "red", "size": "large"} if wanted[-1] == "2" else {}))
    ]
    goal = dataclasses.replace(goal, price_limit=limit)
    return reward.score(goal, catalogue.products[wanted], catalogue.products[bought], options)


def test_scores_by_hand(shop):
    assert score_of(shop, color="red", size="large") == 1.0
    assert score_of(shop, color="red") == 3 / 4  # an option not chosen
    assert score_of(shop, color="red", size="small") == 3 / 4  # a wrong one
    assert score_of(shop, color="red", size="large", limit=40.0) == 3 / 4  # too dear
    assert score_of(shop) == 2 / 4
    # the hose for the coat: same search, so type 1 if the titles share enough; they share no word, so 0
    assert score_of(shop, bought="B000000001") == 0.0
    # for the hose, which has no options: attribute and price
    assert score_of(shop, wanted="B000000001", bought="B000000001") == 1.0
    assert score_of(shop, wanted="B000000001", bought="B000000001", limit=20.0) == 1 / 2


def test_attributes_are_met_by_near_words_or_by_the_text(shop):
    catalogue = load_catalogue(shop)
    goal, hose = catalogue.goals[goal_number(shop, "B000000001")], catalogue.products["B000000001"]
    for wanted, met in (("Kink-Free", 1), ("free of kinks", 0), ("never kinks", 1), ("easy to", 1), ("golden", 0)):
        assert reward.attributes_met(dataclasses.replace(goal, attributes=(wanted,)), hose) == met, wanted


def test_sizes_match_exactly_and_other_options_nearly(shop):
    catalogue = load_catalogue(shop)
    pot = catalogue.products["B000000003"]
    goal = dataclasses.replace(catalogue.goals[0], options={"color": "light grey", "size": "x large"})
    for options, met in (
        ({"color": "grey"}, 1),
        ({"color": "gray"}, 0),
        ({"size": "large"}, 0),
        ({"size": "x large"}, 1),
        ({"color": "clay"}, 1),  # stands in the title
        ({"color": "grey", "size": "x large", "shape": "light grey"}, 2),  # never more than were asked for
    ):
        assert reward.options_met(goal, pot, options) == met, options


def test_type_scores(shop):
    catalogue = load_catalogue(shop)
    base = catalogue.products["B000000002"]

    def kind(asked, title, query="other", categories=("Else",)):
        wanted = dataclasses.replace(base, title=asked)
        bought = dataclasses.replace(base, title=title, query=query, product_category=categories)
        return reward.type_score(wanted, bought)

    five, eleven = "red oak rocking chair cushion", "a1 oak pine ash elm fir yew box hazel beech larch maple"
    assert kind(five, "oak chair") == 1.0  # 2 of 5 words
    assert kind(five, "oak table") == 0.5  # 1 of 5: not above a fifth
    assert kind(five, "oak table", query=base.query) == 1.0
    assert kind(five, "oak table", categories=("Tools", "Garden", "x")) == 1.0
    assert kind(five, "oak table", categories=("Tools",)) == 0.5
    assert kind(eleven, "oak table", query=base.query) == 0.1  # 1 of 11
    assert kind(five, "glass table", query=base.query) == 0.0
    assert kind("12 of 3", "glass table") == 0.5  # no words to compare: 0.2, as in the original
    assert reward.title_words("The Oak-Chair, for 2 and a half") == {"oak-chair", "half"}


def test_a_purchase_that_is_not_perfect_ends_without_reward(env, shop):
    enter(env, shop)
    env.step("search[coat]")
    env.step("click[b000000002]")
    bought = env.step("click[buy now]")
    assert (bought.reward, bought.done, bought.success, bought.score, bought.valid) == (0.0, True, False, 0.5, True)


# --- solutions, isolation


def test_solutions_win(env, shop):
    for task in WebShopEnv.tasks("test", data=shop):
        env.reset(task)
        assert [env.step(command) for command in env.solution(task)][-1].success
        assert env.task_type(task) == "garden"


def test_instances_in_threads_do_not_touch_each_other(shop):
    tasks = WebShopEnv.tasks("test", data=shop) * 8

    def play(task):
        env = make("webshop", data=shop)
        return [env.reset(task), *(env.step(command) for command in env.solution(task))]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, tasks)) == [play(task) for task in tasks]


def test_nothing_global_is_touched_and_a_session_leaves_nothing(env, shop):
    random.seed(5)
    state = random.getstate()
    fresh = vars(make("webshop", data=shop))
    enter(env, shop)
    env.step("search[coat]")
    env.close()
    assert {**vars(env), "_number": -1} == fresh
    assert random.getstate() == state


def test_goals_and_prices_are_the_same_in_every_process(shop, helpers):
    code = f"from openrlhf_bipace.envs.webshop_catalogue import load_catalogue as c; print(c({shop!r}).goals)"

    def run(seed):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(helpers.root)}
        return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout

    assert run("1") == run("2") == f"{load_catalogue(shop).goals}\n"


def test_step_needs_a_running_episode(env, shop):
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("search[x]")
    enter(env, shop)
    for command in ("search[coat]", "click[b000000002]", "click[buy now]"):
        env.step(command)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("search[x]")


def test_a_forgetful_demonstrator_leaves_out_commands_of_the_solution(env, shop):
    task, rng = WebShopEnv.tasks("test", data=shop)[0], random.Random(0)
    solution = env.solution(task)
    scripts = [forgetful(task, rng, shop, p_skip=0.3) for _ in range(40)]
    assert any(script == solution for script in scripts) and any(len(script) < len(solution) for script in scripts)
    for script in scripts:
        left = iter(solution)
        assert script and all(command in left for command in script)  # in the solution's order


# --- misuse


@pytest.mark.parametrize(
    "change, message",
    [
        ({"env": "rooms"}, "env: got 'rooms', allowed: webshop"),
        ({"split": "eval"}, "split: got 'eval', allowed: train, test"),
        ({"task_id": 500}, "task_id: got 500, allowed: a goal of the split 'test', 0 to 499"),
        ({"task_id": 0, "split": "train"}, "task_id: got 0, allowed: a goal of the split 'train', 500 to"),
        ({"task_id": True}, "task_id: got True"),
        ({"task_id": "0"}, "task_id: got '0'"),
        ({"seed": 3}, "key: got 'seed', allowed: env, task_id, split, visit_seed"),
    ],
)
def test_a_malformed_task_is_named(change, message):
    with pytest.raises(ValueError, match=re.escape(f"webshop: {message}")):
        WebShopEnv.check_task({"env": "webshop", "task_id": 0, "split": "test", **change})


def test_a_goal_that_this_shop_does_not_have_is_named(env, shop):
    with pytest.raises(ValueError, match="task_id: got 17, allowed: a goal of this shop, 0 to 4"):
        env.reset({"task_id": 17, "split": "test"})
    with pytest.raises(ValueError, match="task_id: got 17, allowed: a goal of the split 'test', 0 to 4"):
        WebShopEnv.check_task({"task_id": 17, "split": "test"}, shop)
    assert WebShopEnv.tasks("train", data=shop) == []
    with pytest.raises(ValueError, match="types: got .* allowed: one or several of garden, home"):
        WebShopEnv.tasks("test", data=shop, types=("toys",))


def test_missing_or_broken_data_are_named(tmp_path):
    with pytest.raises(ValueError, match="data: got '', allowed: a folder with WebShop's files"):
        make("webshop")
    with pytest.raises(ValueError, match=r"with none, allowed: a folder with one items_shuffle\*.json"):
        make("webshop", data=str(tmp_path))
    for name in ("items_shuffle.json", "items_shuffle_2.json", "items_ins_v2.json"):
        (tmp_path / name).write_text("[{}]")
    with pytest.raises(ValueError, match="with items_shuffle.json, items_shuffle_2.json, allowed: a folder with one"):
        make("webshop", data=str(tmp_path))
    (tmp_path / "items_shuffle_2.json").unlink()
    with pytest.raises(ValueError, match="items_ins_v2.json: got a list, allowed: a dict"):
        make("webshop", data=str(tmp_path))
    (tmp_path / "items_ins_v2.json").write_text("{}")
    with pytest.raises(ValueError, match="items_shuffle.json, record 0: not a product of WebShop .KeyError: 'asin'."):
        make("webshop", data=str(tmp_path))


# --- the real catalogue


def test_the_oracle_on_the_real_catalogue(webshop_data):
    """200 goals of the split test; ``bipace-data verify webshop --play 0`` plays every one."""
    env = make("webshop", data=str(webshop_data))
    scores, lengths = [], []
    for task in WebShopEnv.tasks("test", data=str(webshop_data))[:200]:
        env.reset(task)
        results = [env.step(command) for command in env.solution(task)]
        assert all(r.valid for r in results) and results[-1].done
        scores.append(results[-1].score)
        lengths.append(len(results))
    assert sum(scores) / 200 >= 0.99 and max(lengths) <= env.max_turns


def test_the_real_catalogues_goals(webshop_data):
    """6,910 synthetic goals for the 1,000 products, and prompts that fit."""
    catalogue = load_catalogue(str(webshop_data))
    if len(catalogue.products) != 1000:
        pytest.skip("not the catalogue of 1,000 products")
    assert len(catalogue.goals) == 6910
    assert [len(WebShopEnv.tasks(split, data=str(webshop_data))) for split in ("test", "train")] == [500, 6410]
