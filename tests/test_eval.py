"""bipace-eval: intervals by hand, the log that survives crashes, every policy through the same loop."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from openrlhf_bipace import envs
from openrlhf_bipace.cli import eval as command
from openrlhf_bipace.evaluation.endpoint import Messages, parse
from openrlhf_bipace.evaluation.figures import OVERALL, by_type, figures, interval, over_seeds
from openrlhf_bipace.evaluation.log import EpisodeLog, Result
from openrlhf_bipace.evaluation.report import as_json, tables
from openrlhf_bipace.rollout.context import ChatContext

FAULTY = f"{Path(__file__).parent / 'faulty_env.py'}:Faulty"


def result(task=0, seed=0, success=False, **changes) -> Result:
    given = {
        "type": "a",
        "score": None,
        "reward": float(success),
        "turns": 4,
        "unparsed": 0,
        "refused": 0,
        "end": "done",
    }
    return Result(task, seed, success=success, error="", seconds=0.1, **{**given, **changes})


def evaluate(tmp_path, *words, out="out"):
    """Run the command; its summary."""
    command.main(["--out", str(tmp_path / out), *map(str, words)])
    return json.loads((tmp_path / out / "summary.json").read_text())


# figures


def test_wilson_by_hand():
    """n = 10, k = 7, z = 1.96: centre (0.7 + z²/20) / (1 + z²/10), half width z/(1 + z²/10) sqrt(.021 + z²/400)."""
    low, high = interval([[True]] * 7 + [[False]] * 3)
    z2 = 1.959963984540054**2
    centre, half = (0.7 + z2 / 20) / (1 + z2 / 10), (z2 * (0.021 + z2 / 400)) ** 0.5 / (1 + z2 / 10)
    assert (low, high) == pytest.approx((centre - half, centre + half), abs=1e-12)


def test_repeats_of_a_task_are_not_independent_observations():
    """20 tasks that are always or never solved, 10 times each: the interval is that of 20 observations, not of 200."""
    once = interval([[n < 10] for n in range(20)])
    repeated = interval([[n < 10] * 10 for n in range(20)])
    assert repeated[1] - repeated[0] == pytest.approx(2 * 1.96 * (0.25 / 20) ** 0.5, rel=0.15)
    assert repeated[1] - repeated[0] > 0.9 * (once[1] - once[0])
    with pytest.raises(ValueError, match="at least one task"):
        interval([])


@pytest.mark.parametrize("outcome", [True, False])
def test_no_interval_has_width_zero(outcome):
    low, high = interval([[outcome] * 5] * 8)
    assert high - low == pytest.approx(8**-1 * 1.96**2 / (1 + 1.96**2 / 8), rel=1e-3)


def test_figures_by_hand():
    results = [
        result(0, success=True, turns=2, type="b"),
        result(1, turns=6, unparsed=2, refused=1),
        result(2, end="env_error", turns=50, unparsed=50),
    ]
    found = figures(results)
    assert (found.episodes, found.failed, found.tasks) == (2, 1, 2)
    assert (found.success, found.reward, found.turns) == (0.5, 0.5, 4.0)
    assert (found.invalid, found.unparsed) == (3 / 8, 2 / 8)
    assert found.score is None
    assert figures([result(0, score=0.5), result(1)]).score == 0.25  # not ended: 0
    assert list(by_type(results)) == ["a", "b", OVERALL]
    assert by_type(results)["b"].success == 1.0
    assert figures(results[2:]) is None
    assert over_seeds([result(0, 0, True), result(1, 0), result(0, 1, True), result(1, 1, True)]) == {0: 0.5, 1: 1.0}


def test_peak_and_last():
    runs = {f"step{n}": [result(t, success=t < wins) for t in range(4)] for n, wins in ((1, 1), (2, 3), (3, 2))}
    found = as_json(runs)
    assert found["peak"] == {"policy": "step2", "success": 0.75}
    assert found["last"] == {"policy": "step3", "success": 0.5}
    assert [table.title for table in tables(runs)] == ["success over checkpoints", "step1", "step2", "step3"]
    assert "peak: 75.0% (step2); last: 50.0% (step3)" in tables(runs)[0].caption


def test_checkpoints_come_in_the_order_of_training():
    args = command.parser().parse_args(
        ["--policy", "hf", "--out", "o", "--model", "c/global_step10_hf", "c/global_step9_hf"]
    )
    assert list(command._policies(args)) == ["global_step9_hf", "global_step10_hf"]


# the log


def test_the_log_goes_on_where_it_was_cut(tmp_path):
    """A torn last line is dropped, a failed episode is played again, a later line wins."""
    path = tmp_path / "new" / "episodes.jsonl"
    log = EpisodeLog(path, {"policy": "x"})
    log.append(result(0, success=True))
    log.append(result(1, end="env_timeout"))
    with path.open("a") as file:
        file.write('{"task": 2, "seed')
    again = EpisodeLog(path, {"policy": "x"})
    assert [again.done(task, 0) for task in range(3)] == [True, False, False]
    again.append(result(1, success=True))
    assert [r.success for r in EpisodeLog(path, {"policy": "x"}).results()] == [True, True]
    with pytest.raises(ValueError, match="holds episodes with policy = 'x', now it is 'y'"):
        EpisodeLog(path, {"policy": "y"})
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.raises(ValueError, match="line 5: not a line of an evaluation"):
        EpisodeLog(path, {"policy": "x"})


def test_a_run_is_resumed(tmp_path):
    """Holes are filled and nothing else is played; another seed is added to the same log."""
    flags = ["--policy", "random", "--agent.env", "rooms", "--split", "held_out", "--limit", 6]
    first = evaluate(tmp_path, *flags)
    log = tmp_path / "out" / "random" / "episodes.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:3], lines[3][:20]]))
    assert evaluate(tmp_path, *flags)["policies"] == first["policies"]
    after = log.read_text().splitlines()
    assert after[:3] == lines[:3] and len(after) == 7
    kept = [json.loads(line) for line in lines[3:]], [json.loads(line) for line in after[3:]]
    for some in kept:
        for line in some:
            line.pop("seconds")
    assert sorted(map(str, kept[0])) == sorted(map(str, kept[1]))
    more = evaluate(tmp_path, *flags, "--seeds", 0, 1)
    assert more["policies"]["random"]["overall"]["episodes"] == 12
    assert list(more["policies"]["random"]["success_per_seed"]) == ["0", "1"]


# policies


def test_scripted_wins_and_random_does_not(tmp_path):
    """What the harness must say before a model is worth evaluating."""
    flags = ["--agent.env", "rooms", "--split", "held_out"]
    scripted = evaluate(tmp_path, "--policy", "scripted", *flags, out="a")["policies"]["scripted"]
    assert scripted["overall"]["success"] == 1.0 and scripted["overall"]["tasks"] == 64
    assert set(scripted["by_type"]) == {"plain", "hot", "cold", "clean"}
    random = evaluate(tmp_path, "--policy", "random", *flags, out="b")["policies"]["random"]
    assert random["overall"]["success"] < 0.2 and random["overall"]["invalid"] == 0.0


def test_the_paper_preset(tmp_path):
    summary = evaluate(
        tmp_path, "--policy", "scripted", "--preset", "paper", "--agent.env", "rooms", "--split", "train"
    )
    assert summary["policies"]["scripted"]["overall"]["tasks"] == 128
    args = command.parser().parse_args(["--policy", "hf", "--model", "m", "--preset", "paper", "--out", "o"])
    with pytest.raises(ValueError, match="--agent.env: got nothing"):
        command._settle(args)
    assert (args.limit, args.temperature, args.seeds) == (128, 0.4, [0])


def test_environments_that_fail_are_counted_and_left_out(tmp_path, capsys):
    tasks = tmp_path / "tasks.jsonl"
    labels = [{"turns": 2}, {"turns": 2, "fault": "raise"}, {"turns": 3}]
    tasks.write_text("".join(json.dumps({"input": "", "label": json.dumps(task)}) + "\n" for task in labels))
    flags = ["--policy", "random", "--agent.env", FAULTY, "--tasks", tasks]
    overall = evaluate(tmp_path, *flags)["policies"]["random"]["overall"]
    assert (overall["episodes"], overall["failed"], overall["success"], overall["turns"]) == (2, 1, 1.0, 2.5)
    assert "2+1 failed" in capsys.readouterr().out
    tasks.write_text(json.dumps({"label": json.dumps(labels[1])}) + "\n")
    with pytest.raises(SystemExit, match="every episode failed, the first with: .*the world broke"):
        evaluate(tmp_path, *flags, out="all")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--policy random --split train", "--agent.env: got nothing"),
        ("--policy random --agent.env rooms", "--split: got '', allowed: a split, or --tasks with a file"),
        ("--policy random --agent.env rooms --split nowhere", "split: got 'nowhere', allowed: train, held_out"),
        ("--policy random --agent.env rooms --split train --model m", "--model: got ['m'], allowed: a model with hf"),
        ("--policy hf --agent.env rooms --split train", "--model: got []"),
        ("--policy openai --model m --agent.env rooms --split train", "--endpoint: got ''"),
        ("--policy random --agent.env rooms --split train --seeds 1 1", "--seeds: got [1, 1], allowed: different"),
        ("--policy random --agent.env rooms --tasks /nowhere.jsonl", "/nowhere.jsonl"),
        ("--policy scripted --agent.env FAULTY --split train", "knows no solution"),
    ],
)
def test_bad_flags_end_with_one_line(words, complaint, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([*words.replace("FAULTY", FAULTY).split(), "--out", str(tmp_path / "o")])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_messages_are_read_back():
    """What `ChatContext` renders for an endpoint, at every boundary, cut responses included."""
    context, tokenizer = ChatContext(Messages()), Messages()
    ids = context.first("look\naround")
    assert parse(ids) == [{"role": "user", "content": "look\naround"}]
    for cut in (False, True):
        reply = tokenizer("<action>go</action>")["input_ids"] + [] if cut else [*tokenizer("hm")["input_ids"], 0xFDD1]
        ids = ids + reply + context.next(reply, "next")
    assert [m["content"] for m in parse(ids)] == ["look\naround", "hm", "next", "<action>go</action>", "next"]
    assert [m["role"] for m in parse(ids)] == ["user", "assistant", "user", "assistant", "user"]


@pytest.fixture
def endpoint():
    """A chat endpoint on 127.0.0.1 that plays `rooms` by its solutions and stumbles now and then; (url, requests)."""
    from aiohttp import web

    env = envs.make("rooms")
    solutions = {}
    for task in envs.env_class("rooms").tasks("held_out")[:5]:
        solutions[env.reset(task).task] = env.solution(task)
    requests = []

    async def complete(request):
        body = await request.json()
        requests.append(body)
        if len(requests) in (2, 5):
            return web.json_response({"error": {"message": "busy"}}, status=503)
        goal = next(goal for goal in solutions if f"Your task: {goal}\n" in body["messages"][0]["content"])
        command = solutions[goal][len(body["messages"]) // 2]
        message = {"role": "assistant", "content": f"<think>so</think><action>{command}</action>"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    loop, started, address = asyncio.new_event_loop(), threading.Event(), []

    async def serve():
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(site._server.sockets[0].getsockname()[1])
        started.set()

    def run():
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(20)
    yield f"http://127.0.0.1:{address[0]}/v1", requests
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_an_endpoint_plays(tmp_path, endpoint):
    """Five episodes won over HTTP, two server errors retried; temperature, token cap and messages arrive."""
    url, requests = endpoint
    tasks = tmp_path / "tasks.jsonl"
    played = envs.env_class("rooms").tasks("held_out")[:5]
    tasks.write_text("".join(json.dumps({"label": json.dumps(task)}) + "\n" for task in played))
    flags = ["--policy", "openai", "--endpoint", url, "--model", "someone/model", "--agent.env", "rooms"]
    summary = evaluate(tmp_path, *flags, "--tasks", tasks, "--agent.max_turn_tokens", 99)
    overall = summary["policies"]["model"]["overall"]
    assert (overall["episodes"], overall["success"], overall["invalid"]) == (5, 1.0, 0.0)
    assert {(r["model"], r["temperature"], r["max_tokens"]) for r in requests} == {("someone/model", 0.4, 99)}
    assert [m["role"] for m in requests[-1]["messages"]][:3] == ["user", "assistant", "user"]
    turns = sum(json.loads(line)["turns"] for line in _episodes(tmp_path, "model"))
    assert len(requests) == turns + 2


def test_an_endpoint_that_is_not_there(tmp_path, monkeypatch, capsys):
    from openrlhf_bipace.evaluation import endpoint

    monkeypatch.setattr(endpoint, "RETRIES", 0)
    flags = ["--policy", "openai", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--agent.env", "rooms"]
    with pytest.raises(SystemExit) as stop:
        evaluate(tmp_path, *flags, "--split", "held_out", "--limit", 2)
    assert stop.value.code == 2
    assert "error: --endpoint http://127.0.0.1:9/v1: Connection error." in capsys.readouterr().err


def _episodes(tmp_path, name):
    return (tmp_path / "out" / name / "episodes.jsonl").read_text().splitlines()[1:]


def test_a_checkpoint_plays_as_in_the_lab(tmp_path, tiny, rooms_tasks):
    """--policy hf gives the trajectories of lab.policy.evaluate on the same tasks, greedily."""
    from openrlhf_bipace.config import AgentConfig
    from openrlhf_bipace.lab.policy import evaluate as lab

    flags = ["--agent.env", "rooms", "--agent.max_turns", 3, "--agent.max_turn_tokens", 6, "--temperature", 0]
    summary = evaluate(tmp_path, "--policy", "hf", "--model", tiny.folder, "--tasks", rooms_tasks.held_out, *flags)
    assert summary["protocol"]["temperature"] == 0
    config = AgentConfig(env="rooms", max_turns=3, max_turn_tokens=6)
    tasks = [json.loads(json.loads(line)["label"]) for line in rooms_tasks.held_out.read_text().splitlines()]
    expected = lab(tiny.model, tiny.tokenizer, config, tasks, temperature=0, max_length=16384)
    got = sorted((json.loads(line) for line in _episodes(tmp_path, tiny.folder.name)), key=lambda line: line["task"])
    assert [(g["turns"], g["reward"], g["success"]) for g in got] == [
        (len(t.steps), t.reward, t.success) for t in expected
    ]


@pytest.mark.stack
def test_vllm_plays_like_transformers(tmp_path, tiny, rooms_tasks, helpers):
    """The same checkpoint, greedily, through both engines: the same episodes, invalid turns included."""
    flags = ["--agent.env", "rooms", "--agent.template", "terse", "--agent.max_turns", "3"]
    flags += ["--agent.max_turn_tokens", "8", "--temperature", "0", "--tasks", str(rooms_tasks.held_out)]
    flags += ["--model", str(tiny.folder), "--max_length", "1024"]
    figures = []
    for policy in ("hf", "vllm"):
        words = ["--policy", policy, *flags, "--out", str(tmp_path / policy)]
        helpers.run_module("openrlhf_bipace.cli.eval", words, tmp_path)
        figures.append(json.loads((tmp_path / policy / "summary.json").read_text())["policies"])
    assert figures[0] == figures[1]
