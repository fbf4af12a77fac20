"""Tiny models and their warm start: what the demo and the other tests stand on."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.envs import rooms_text
from openrlhf_bipace.lab import policy, tiny, warmstart
from openrlhf_bipace.lab.demonstrators import flawed_householder
from openrlhf_bipace.rollout.agent import AgentLoop, Generation
from openrlhf_bipace.rollout.rows import rows_of


def test_tags_survive_decoding_and_special_tokens_do_not(tiny_ids):
    tokenizer, encode = tiny_ids
    ids = [*encode("<think>so</think><action>go hall</action>"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>so</think><action>go hall</action>"
    assert [len(encode(tag)) for tag in ("<action>", "</action>", "<think>", "</think>")] == [1, 1, 1, 1]


@pytest.fixture
def tiny_ids(tiny):
    return tiny.tokenizer, lambda text: tiny.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_word_of_rooms_round_trips(tiny_ids):
    tokenizer, encode = tiny_ids
    names = {
        "room": "hall",
        "container": "chest",
        "object": "book",
        "condition": "hot",
        "source": "study",
        "at": "hall",
    }
    for sentences in rooms_text.WORDINGS.values():
        for sentence in sentences:
            text = sentence.format_map({**names, **dict.fromkeys(_fields(sentence), "book")})
            assert tokenizer.decode(encode(text)) == text
    assert len(encode(" kitchen")) == 1  # a common word is one token


def _fields(sentence: str) -> list[str]:
    import string

    return [name for _, name, _, _ in string.Formatter().parse(sentence) if name]


def test_demonstrations_are_rendered_as_the_trainer_will_see_them(tiny):
    """The ids the clone learns on equal those of AgentLoop driven by a policy that says the same commands."""
    task = warmstart.default_tasks("rooms", "train")[3]
    script = warmstart.SETTINGS["rooms"].demonstrator(task, random.Random(1))[:10]
    config = AgentConfig(env="rooms", template="terse", max_turns=16)
    shown = warmstart.demonstrate(config, tiny.tokenizer, [task], [script], seed=5)[0]

    async def generate(context, max_tokens, turn):
        text = f"<action>{script[turn]}</action>"
        ids = tiny.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Generation([*ids, tiny.tokenizer.eos_token_id], "stop")

    loop = AgentLoop(replace(config, max_turns=len(script)), tiny.tokenizer, 4096)
    visit_seed = random.Random(5).getrandbits(31)
    played = asyncio.run(loop.run(task, "0", 0, generate, visit_seed))
    assert rows_of(shown) == rows_of(played)
    assert [step.executed for step in played.steps] == script[: len(played.steps)]


def test_the_householders_mistakes_are_systematic():
    """Without the flaw every demonstration succeeds; with it the same task always goes wrong in the same way."""
    tasks = warmstart.default_tasks("rooms", "train")[:60]
    perfect = [flawed_householder(t, random.Random(0), p_flawed=0.0) for t in tasks]
    flawed = [flawed_householder(t, random.Random(s), p_flawed=1.0) for t in tasks for s in (0, 1)]
    assert [success(t, s) for t, s in zip(tasks, perfect, strict=True)] == [True] * 60
    outcomes = [success(tasks[i // 2], script) for i, script in enumerate(flawed)]
    assert outcomes[::2] == outcomes[1::2] and 0 < sum(outcomes) < 60


def success(task, script) -> bool:
    env = envs.make("rooms")
    env.reset(task)
    return any([env.step(command).success for command in script])


def test_cloning_lowers_the_loss_and_the_folder_reloads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = warmstart.clone("rooms", episodes=60, steps=30, progress=False)
    assert sum(start.losses[-5:]) < 0.5 * sum(start.losses[:5])
    tiny.save(start.model, start.tokenizer, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer("<action>go hall</action> . the book")["input_ids"]])
    assert ids.tolist() == [start.tokenizer("<action>go hall</action> . the book")["input_ids"]]
    torch.testing.assert_close(model(ids).logits, start.model(ids).logits)


def test_batched_answers_equal_single_ones(tiny):
    """Left padding and the cache change nothing: greedy tokens equal transformers' generate."""
    contexts = [
        tiny.tokenizer(text)["input_ids"] for text in ("the book", "you stand in the hall . the chest is shut")
    ]

    async def ask():
        player = policy.TorchPolicy(tiny.model, tiny.tokenizer, temperature=0)
        return await asyncio.gather(*(player.generate(context, 6, 0) for context in contexts))

    for context, reply in zip(contexts, asyncio.run(ask()), strict=True):
        ids = torch.tensor([context])
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        expected = tiny.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(context) :]
        assert reply.token_ids == expected.tolist()
        assert len(reply.logprobs) == len(reply.token_ids)


def test_evaluation_repeats_itself_and_keeps_order(tiny):
    config = AgentConfig(env="rooms", template="terse", max_turns=2, max_turn_tokens=6)
    tasks = warmstart.default_tasks("rooms", "held_out")[:3]
    first, second = (policy.evaluate(tiny.model, tiny.tokenizer, config, tasks, samples=2, seed=4) for _ in range(2))
    assert [(t.group, t.sample) for t in first] == [(str(i), s) for i in range(3) for s in range(2)]
    rows, again = ([row for t in run for row in rows_of(t)] for run in (first, second))
    assert [(row.tokens, row.spans) for row in rows] == [(row.tokens, row.spans) for row in again]
    # Who shares a batch depends on timing, and a batch of another width rounds differently.
    for one, other in zip(rows, again, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_head_sizes_without_a_kernel_are_refused(tiny):
    with pytest.raises(ValueError, match="head size hidden / heads: got 64 / 4"):
        lab_model(tiny.tokenizer, hidden=64, heads=4)
    with pytest.raises(ValueError, match="kv_heads: got 3"):
        lab_model(tiny.tokenizer, hidden=128, heads=4, kv_heads=3)


lab_model = tiny.build_model


def test_unknown_environment_is_named():
    with pytest.raises(ValueError, match="env: got 'chess', allowed: alfworld, rooms, textcraft, webshop"):
        warmstart.clone("chess")


def test_task_files_are_prompt_datasets(tmp_path):
    tasks = warmstart.default_tasks("rooms", "held_out")
    warmstart.write_tasks(tmp_path / "tasks.jsonl", tasks)
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [json.loads(row["label"]) for row in rows] == tasks
    assert rows[0]["datasource"] == "rooms"


def test_the_lab_needs_no_host():
    code = "import openrlhf_bipace.lab.warmstart, openrlhf_bipace.lab.policy, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"ray", "vllm", "deepspeed", "openrlhf"} & {name.partition(".")[0] for name in loaded}
