"""ALFWorld: the stock engine's transcripts, walkthroughs that win, true states, speed, memory, misuse."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError

import pytest

from openrlhf_bipace.envs import alfworld_engine as engine
from openrlhf_bipace.envs import make
from openrlhf_bipace.envs.alfworld import TYPES, AlfworldEnv, game_path, games_folder, type_of

SEEN = "valid_seen/pick_heat_then_place_in_recep-Mug-None-Cabinet-1/trial_T1/game.tw-pddl"


def one_of_each_type(folder, count=1):
    """`count` valid_seen tasks of every type, evenly spread."""
    found = []
    for kind in TYPES:
        tasks = AlfworldEnv.tasks("valid_seen", data=str(folder), types=(kind,))
        found += tasks[:: len(tasks) // count][:count]
    return found


def stock(path):
    """textworld's own engine, as alfworld 0.4.2 runs it."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

    wanted = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
    return textworld.start(str(path), wanted, wrappers=[AlfredDemangler(shuffle=False), AlfredInfos])


def true_facts(state):
    """What is true and can matter, out of the stock engine's own facts."""
    ignored = ("not_", "checked", "new-axiom")
    return frozenset(str(fact) for fact in state["_facts"] if not fact.name.startswith(ignored))


@pytest.fixture(scope="module")
def world(alfworld_data):
    env = make("alfworld", data=str(alfworld_data))
    yield env
    env.close()


# --- against the stock engine


def test_transcripts_and_states_are_the_stock_engines(alfworld_data, world):
    """Whole games: walkthroughs with looks and refused commands in between.

    Three games here; ``benchmarks/environments.py --stock 140`` compares all of valid_seen.
    """
    rng = random.Random(0)
    seconds = {"stock": 0.0, "ours": 0.0}
    for task in one_of_each_type(alfworld_data)[1::2]:
        theirs = stock(game_path(task, str(alfworld_data)))
        expected, got = theirs.reset(), world.reset(task)
        assert got.text == expected.feedback
        listed, ids, facts = got.admissible, [got.state_id], [true_facts(expected)]
        for turn, planned in enumerate(world.solution(task)):
            harmless = [c for c in listed if c.startswith(("look", "inventory", "examine"))]
            for command in (rng.choice(harmless) if turn % 3 else "go to nowhere 7", planned):
                begin = time.perf_counter()
                expected, _, _ = theirs.step(command)
                middle = time.perf_counter()
                result = world.step(command)
                seconds["stock"] += middle - begin
                seconds["ours"] += time.perf_counter() - middle
                assert result.text == expected.feedback, (task, command)
                assert sorted([*result.admissible, "help"]) == expected["admissible_commands"], (task, command)
                assert result.success == bool(expected["won"])
                assert result.valid == (command != "go to nowhere 7")
                ids.append(result.state_id)
                facts.append(true_facts(expected))
                listed = result.admissible
        assert result.success
        # equal ids exactly where the stock engine's facts are equal
        assert [ids.index(i) for i in ids] == [facts.index(f) for f in facts]
    assert seconds["stock"] > 10 * seconds["ours"]


def test_random_play_is_the_stock_engines_too(alfworld_data, world):
    task = AlfworldEnv.tasks("valid_seen", data=str(alfworld_data))[-1]
    theirs, rng = stock(game_path(task, str(alfworld_data))), random.Random(1)
    theirs.reset()
    listed = world.reset(task).admissible
    for _ in range(25):
        command = rng.choice([*listed, "help"])
        expected, _, _ = theirs.step(command)
        result = world.step(command)
        assert result.text == expected.feedback
        assert sorted([*result.admissible, "help"]) == expected["admissible_commands"]
        listed = result.admissible


# --- playing


def test_walkthroughs_win(alfworld_data, world):
    """Three games of every type here; ``bipace-data verify alfworld --play 0 --split valid_seen`` plays all 140."""
    for task in one_of_each_type(alfworld_data, count=3):
        world.reset(task)
        *before, last = [world.step(command) for command in world.solution(task)]
        assert last.success and last.done and last.reward == 10.0, task
        assert all(r.valid and not r.done and r.reward == 0.0 for r in before), task


def test_first_observation(alfworld_data, world):
    task = next(
        t for t in AlfworldEnv.tasks("valid_seen", data=str(alfworld_data)) if "Newspaper-None-Drawer" in t["game"]
    )
    seen = world.reset(task)
    assert seen.task == "put two newspaper in drawer."
    assert seen.text.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking")
    assert seen.text.endswith("\n\nYour task is to: put two newspaper in drawer.")
    assert {"look", "inventory", "go to sofa 1"} <= set(seen.admissible) and "help" not in seen.admissible
    assert world.task_type(task) == "pick_two_obj_and_place"
    assert "move OBJECT to RECEPTACLE" in world.instructions and world.max_turns == 50


def test_move_is_the_verb_and_put_is_not(alfworld_data, world):
    """C20, with the games of release 0.4."""
    task = one_of_each_type(alfworld_data)[0]
    plan = world.solution(task)
    world.reset(task)
    for command in plan[:-1]:
        world.step(command)
    thing, place = re.fullmatch(r"move (.+) to (.+)", plan[-1]).groups()
    for command in (f"put {thing} in/on {place}", f"put {thing} in {place}"):
        result = world.step(command)
        assert (result.text, result.valid, result.executed, result.done) == ("Nothing happens.", False, "", False)
    assert world.step(plan[-1]).success


def test_a_game_of_an_older_release_keeps_its_own_verb(alfworld_data, world, tmp_path):
    """C20, with a game whose grammar says "put": the verb is the game file's, not the engine's."""
    source = game_path(one_of_each_type(alfworld_data)[0], str(alfworld_data))
    path = tmp_path / source.parent.parent.name / "trial" / source.name
    path.parent.mkdir(parents=True)
    path.write_text(source.read_text().replace("move {o} to {r}", "put {o} in/on {r}"))
    task = {"game": str(path)}
    thing, place = re.fullmatch(r"move (.+) to (.+)", world.solution(task)[-1]).groups()
    world.reset(task)
    for command in world.solution(task)[:-1]:
        world.step(command)
    assert world.step(f"move {thing} to {place}").text == "Nothing happens."
    assert world.step(f"put {thing} in/on {place}").success


def test_case_and_spacing_do_not_matter_and_nothing_else_is_forgiven(alfworld_data, world):
    seen = world.reset(one_of_each_type(alfworld_data)[0])
    command = next(c for c in seen.admissible if c.startswith("go to "))
    result = world.step(f"  {command.upper().replace(' ', '  ')} ")
    assert result.valid and result.executed == command
    for refused in ("", command + ".", command[:-1], "go", "look at everything"):
        result = world.step(refused)
        assert (result.text, result.valid, result.executed, result.reward) == ("Nothing happens.", False, "", 0.0)
    assert world.step("help").text.lstrip().startswith("Available commands:")


# --- true states


def test_state_ids_tell_states_apart_and_nothing_else(alfworld_data, world):
    task = one_of_each_type(alfworld_data)[0]
    take = next(k for k, c in enumerate(world.solution(task)) if c.startswith("take"))
    first = world.reset(task).state_id
    for command in world.solution(task)[:take]:
        before = world.step(command).state_id
    taking = world.solution(task)[take]
    thing, place = re.fullmatch(r"take (.+) from (.+)", taking).groups()
    assert before != first
    assert world.step("look").state_id == world.step("inventory").state_id == world.step("nonsense").state_id == before
    held = world.step(taking).state_id
    assert held != before
    assert world.step(f"move {thing} to {place}").state_id == before  # another way to the same state
    assert world.step(taking).state_id == held
    assert world.reset(task).state_id == first


def test_the_same_room_with_another_goal_is_another_state(alfworld_data, world, tmp_path):
    source = game_path(one_of_each_type(alfworld_data)[0], str(alfworld_data))
    raw = json.loads(source.read_text())
    raw["pddl_problem"] = raw["pddl_problem"].rstrip() + "\n; another goal\n"
    path = tmp_path / source.parent.parent.name / "trial" / source.name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(raw))
    assert world.reset({"game": str(path)}).state_id != world.reset({"game": str(source)}).state_id


# --- instances, memory, processes


def test_interleaved_instances_do_not_touch_each_other(alfworld_data):
    tasks = one_of_each_type(alfworld_data)[:2]
    worlds = [make("alfworld", data=str(alfworld_data)) for _ in tasks]
    alone = []
    for task in tasks:
        alone.append([worlds[0].reset(task), *map(worlds[0].step, worlds[0].solution(task)[:4])])
    together = [[w.reset(task)] for w, task in zip(worlds, tasks, strict=True)]
    plans = [w.solution(task) for w, task in zip(worlds, tasks, strict=True)]
    for turn in range(4):
        for w, plan, results in zip(worlds, plans, together, strict=True):
            results += [w.step(command) for command in plan[:4][turn : turn + 1]]
    assert together == alone
    for w in worlds:
        w.close()
        w.close()


def test_memory_stays_flat_and_the_process_ends_well(alfworld_data):
    """Instances made, reset and closed over and over: the stock engine would add 4 MB each, or crash at the end."""
    code = f"""
import psutil
from openrlhf_bipace.envs import make
from openrlhf_bipace.envs.alfworld import AlfworldEnv
tasks = AlfworldEnv.tasks("valid_seen", data={str(alfworld_data)!r})[:3]
def play(k):
    env = make("alfworld", data={str(alfworld_data)!r})
    for task in (tasks[k % 3], tasks[(k + 1) % 3]):
        env.reset(task)
        env.step("look")
    env.close()
two = [make("alfworld", data={str(alfworld_data)!r}) for _ in range(2)]
for env in two:
    env.reset(tasks[0])
for k in range(50):
    play(k)
memory = psutil.Process().memory_info
before = memory().rss
for k in range(150):
    play(k)
print((memory().rss - before) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=sys.path[0] or ".")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 20, "MB over 300 resets"


def test_translating_a_game_leaves_the_interpreter_as_it_was(alfworld_data):
    engine.load_game.cache_clear()
    arguments, output = list(sys.argv), sys.stdout
    make("alfworld", data=str(alfworld_data)).reset(AlfworldEnv.tasks("valid_seen", data=str(alfworld_data))[0])
    assert sys.argv == arguments and sys.stdout is output


# --- tasks and misuse (no games needed)


def test_tasks_are_the_games_of_a_split(alfworld_data):
    tasks = AlfworldEnv.tasks("valid_seen", data=str(alfworld_data))
    assert len(tasks) == 140 == sum(len(AlfworldEnv.tasks("valid_seen", str(alfworld_data), (t,))) for t in TYPES)
    assert tasks == sorted(tasks, key=lambda task: task["game"]) and {t["split"] for t in tasks} == {"valid_seen"}
    for task in tasks[:3]:
        AlfworldEnv.check_task(task, str(alfworld_data))


def test_games_are_found_without_traj_data_at_either_level(tmp_path, monkeypatch):
    for root in (tmp_path / "a", tmp_path / "b" / "json_2.1.1"):
        (root / SEEN).parent.mkdir(parents=True)
        (root / SEEN).write_text("{}")
    for named in (tmp_path / "a", tmp_path / "b"):
        assert AlfworldEnv.tasks("valid_seen", str(named)) == [
            {"env": "alfworld", "game": SEEN, "split": "valid_seen"}
        ]
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "b"))
    assert games_folder() == tmp_path / "b" / "json_2.1.1"
    assert type_of(SEEN) == "pick_heat_then_place_in_recep"
    with pytest.raises(ValueError, match="split: got 'train', allowed: a folder of .* with games"):
        AlfworldEnv.tasks("train")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"env": "rooms"}, "env: got 'rooms', allowed: alfworld"),
        ({"game": None}, "game: got None, allowed: a path to a game.tw-pddl"),
        ({"game": "valid_seen/x/game.json"}, "game: got 'valid_seen/x/game.json', allowed: a path to a game.tw-pddl"),
        ({"game": "cook-1/t/game.tw-pddl"}, "game: got 'cook-1/t/game.tw-pddl', allowed: a path that ends TYPE-"),
        ({"split": "test"}, "split: got 'test', allowed: train, valid_train, valid_seen, valid_unseen"),
        ({"task_id": 3}, "key: got 'task_id', allowed: env, game, split, visit_seed"),
    ],
)
def test_a_malformed_task_is_named(change, message):
    with pytest.raises(ValueError, match=re.escape(f"alfworld: {message}")):
        AlfworldEnv.check_task({"env": "alfworld", "game": SEEN, **change})


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(ValueError, match="data: got '', allowed: a folder with ALFWorld's games, or ALFWORLD_DATA"):
        AlfworldEnv.tasks("train")
    with pytest.raises(ValueError, match="allowed: a folder that holds one of train, valid_train"):
        games_folder(str(tmp_path))
    (tmp_path / "valid_seen").mkdir()
    with pytest.raises(ValueError, match="game: got .* allowed: a file; there is none at"):
        AlfworldEnv.check_task({"game": SEEN}, str(tmp_path))
    with pytest.raises(ValueError, match="split: got 'seen', allowed: train"):
        AlfworldEnv.tasks("seen", str(tmp_path))
    with pytest.raises(ValueError, match=r"types: got \('cook',\), allowed: one or several of pick_and_place_simple"):
        AlfworldEnv.tasks("valid_seen", str(tmp_path), types=("cook",))


def test_a_file_that_is_no_game_is_named(tmp_path):
    path = tmp_path / "game.tw-pddl"
    for content, problem in (
        ("[]", "no attribute"),
        ("{", "Expecting"),
        ('{"grammar": ""}', "no pddl_domain, pddl_problem"),
    ):
        path.write_text(content)
        with pytest.raises(
            ValueError, match=f"alfworld: game: got '{path}', allowed: a game.tw-pddl file .*{problem}"
        ):
            engine.read_game(path)


@pytest.mark.parametrize("found, message", [("0.3.5", r"alfworld==0.4.2, got 0.3.5"), (None, "alfworld==0.4.2: pip")])
def test_another_version_is_refused_with_both_named(monkeypatch, found, message):
    def version(package):
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr(engine, "version", version)
    with pytest.raises(ImportError, match=f"ALFWorld needs {message}"):
        engine.check_installed()


def test_step_needs_a_running_episode(alfworld_data):
    env = make("alfworld", data=str(alfworld_data))
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("look")
    task = one_of_each_type(alfworld_data)[0]
    env.reset(task)
    for command in env.solution(task):
        env.step(command)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("look")
    env.close()
