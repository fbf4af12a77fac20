"""The agent loop with a scripted policy: budgets, tokens, failures. No engine, no Ray."""

from __future__ import annotations

import asyncio
import time

import pytest

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.records import EndReason
from openrlhf_bipace.rollout.agent import AgentLoop, Generation
from openrlhf_bipace.rollout.context import ChatContext
from openrlhf_bipace.rollout.rows import hidden_positions, rows_of
from openrlhf_bipace.rollout.summary import summarise


class Counter(envs.TextEnv):
    """Pays -0.2, then 1.0, with an empty observation in between; raises or sleeps where the task says so."""

    max_turns = 3

    def reset(self, task):
        self.task, self.turn = task, 0
        return envs.Observation("start here", "count")

    def step(self, text):
        self.turn += 1
        if self.task.get("raise_at") == self.turn:
            raise OSError("the world broke")
        if self.task.get("sleep_at") == self.turn:
            time.sleep(1.0)
        done = self.turn == self.task.get("turns", 2)
        return envs.StepResult(
            "" if self.turn == 1 else "again", -0.2 if self.turn == 1 else 1.0, done, done, bool(text), text
        )

    @classmethod
    def tasks(cls, split):
        return [{}]

    @classmethod
    def check_task(cls, task):
        pass


@pytest.fixture
def loop(tiny, monkeypatch):
    """Build an AgentLoop over `Counter`."""
    monkeypatch.setattr(envs, "make", lambda name, **options: Counter())

    def build(max_length=512, **options):
        return AgentLoop(AgentConfig(env="rooms", template="terse", **options), tiny.tokenizer, max_length)

    return build


def says(tiny, *texts, finish="stop"):
    """A policy that says `texts` in turn, cut at the budget; every call is recorded."""
    calls = []

    async def generate(context, max_tokens, turn):
        calls.append((list(context), max_tokens, turn))
        ids = tiny.tokenizer(texts[turn % len(texts)], add_special_tokens=False)["input_ids"]
        ids = ids + [tiny.tokenizer.eos_token_id] if finish == "stop" else ids
        cut = ids[:max_tokens]
        return Generation(cut, "length" if len(cut) < len(ids) or finish == "length" else "stop")

    generate.calls = calls
    return generate


def run(loop, generate, task=None):
    return asyncio.run(loop.run(task or {}, "g", 0, generate))


def test_rewards_stay_on_their_turns_and_empty_feedback_keeps_turns_apart(tiny, loop):
    """C16, C17."""
    trajectory = run(loop(), says(tiny, "<action>a</action>"))
    assert [s.reward for s in trajectory.steps] == [-0.2, 1.0]
    assert trajectory.reward == pytest.approx(0.8)
    assert (trajectory.end, trajectory.success) == (EndReason.DONE, True)
    row = rows_of(trajectory)[0]
    assert len(row.spans) == 2 and row.spans[0][1] < row.spans[1][0]
    assert trajectory.steps[1].observation == ""


@pytest.mark.parametrize("rule, heard", [("strict", ""), ("verl", "go")])
def test_what_the_environment_hears_of_a_response_against_the_format(tiny, loop, rule, heard):
    """C21: without thoughts an action is no error for the strict rule; with two tags it is one, and for verl's too."""
    trajectory = run(loop(parser=rule), says(tiny, "<action>go</action><action>stop</action>"))
    assert [(s.executed, s.action, s.valid) for s in trajectory.steps] == [(heard, "", False)] * 2


def test_ids_trained_on_are_the_ids_sampled(tiny, loop):
    """C13: "go" spelled letter by letter re-tokenises to fewer ids; the row keeps what was sampled."""
    letters = [i for c in "<action>" for i in tiny.tokenizer(c, add_special_tokens=False)["input_ids"]]
    assert tiny.tokenizer(tiny.tokenizer.decode(letters), add_special_tokens=False)["input_ids"] != letters

    async def generate(context, max_tokens, turn):
        return Generation(letters, "stop")

    row = rows_of(run(loop(), generate))[0]
    assert [row.tokens[s:e] for s, e in row.spans] == [letters, letters]


def test_each_context_extends_the_one_before(tiny, loop):
    generate = says(tiny, "<action>a</action>")
    trajectory = run(loop(), generate)
    first, second = (context for context, _, _ in generate.calls)
    assert second[: len(first)] == first
    row = rows_of(trajectory)[0]
    assert row.tokens[: row.spans[1][0]] == second


def test_turn_cap_holds_on_every_turn(tiny, loop):
    """C12: the cap survives turn 1, and every sample of a group has its own."""
    generate = says(tiny, "so now then well next here " * 5)
    trajectory = run(loop(max_turn_tokens=6), generate, {"turns": 3})
    assert [len(s.response_ids) for s in trajectory.steps] == [6, 6, 6]
    assert [s.finish_reason for s in trajectory.steps] == ["length"] * 3
    assert [budget for _, budget, _ in generate.calls] == [6, 6, 6]


def test_full_context_says_so(tiny, loop):
    """C10: a budget that runs out ends the trajectory as truncated, with the reason."""
    used = len(run(loop(), says(tiny, "<action>a</action>"), {"turns": 9}).steps[0].prompt_ids)
    trajectory = run(loop(max_length=used + 8), says(tiny, "so now then well next here so now"), {"turns": 9})
    assert trajectory.end is EndReason.CONTEXT_FULL and trajectory.end.truncated
    assert len(rows_of(trajectory)[0].tokens) <= used + 8


def test_no_budget_at_all(tiny, loop):
    """C9: nothing generated, no row, nothing that could become NaN."""
    trajectory = run(loop(max_length=3), says(tiny, "<action>a</action>"))
    assert trajectory.steps == [] and rows_of(trajectory) == []
    assert trajectory.end is EndReason.CONTEXT_FULL
    assert summarise([trajectory])["agent/success"] == 0.0


def test_turn_limit(tiny, loop):
    trajectory = run(loop(), says(tiny, "<action>a</action>"), {"turns": 9})
    assert trajectory.end is EndReason.TURN_LIMIT and len(trajectory.steps) == Counter.max_turns
    assert len(run(loop(max_turns=1), says(tiny, "<action>a</action>"), {"turns": 9}).steps) == 1


def test_one_crash_costs_one_trajectory(tiny, loop):
    """C18: 1 of 8 environments raises; 7 are kept, the error names task and turn."""
    agent = loop()

    async def group():
        tasks = [{"n": i, **({"raise_at": 2} if i == 3 else {})} for i in range(8)]
        generate = says(tiny, "<action>a</action>")
        return await asyncio.gather(*(agent.run(t, "g", i, generate) for i, t in enumerate(tasks)))

    trajectories = asyncio.run(group())
    assert [t.end for t in trajectories].count(EndReason.DONE) == 7
    failed = trajectories[3]
    assert failed.end is EndReason.ENV_ERROR and failed.end.failed
    assert "turn 1" in failed.error and "'n': 3" in failed.error and "OSError: the world broke" in failed.error
    figures = summarise(trajectories)
    assert figures["agent/failed"] == 1 and figures["agent/success"] == 1.0


def test_a_hanging_environment_times_out(tiny, loop):
    trajectory = run(loop(step_timeout=0.1), says(tiny, "<action>a</action>"), {"sleep_at": 1})
    assert trajectory.end is EndReason.ENV_TIMEOUT
    assert "step took over 0.1 s" in trajectory.error


def test_an_unparsed_response_costs_a_turn(tiny, loop):
    trajectory = run(loop(), says(tiny, "hello", "<action> b </action>"))
    first, second = trajectory.steps
    assert (first.valid, first.accepted, first.action, first.executed) == (False, False, "", "")
    assert (second.valid, second.accepted, second.action) == (True, True, "b")


def test_where_hidden_states_are_read(tiny, loop):
    """The last prompt token, or the token before the action's body."""
    trajectory = run(loop(), says(tiny, "<think>so</think><action>b</action>"))
    row = rows_of(trajectory)[0]
    at_prompt = hidden_positions(row, trajectory, "prompt_end")
    assert at_prompt == [start - 1 for start, _ in row.spans]
    for position, (start, end) in zip(hidden_positions(row, trajectory, "action_start"), row.spans, strict=True):
        assert tiny.tokenizer.decode(row.tokens[start : position + 1]) == "<think>so</think><action>"
        assert position < end


def test_incremental_ids_equal_a_full_render(tiny):
    """C15: at every turn boundary, the template's newline included; also when the response was cut."""
    context, tok = ChatContext(tiny.tokenizer), tiny.tokenizer
    messages, ids = [], []
    for turn in range(3):
        user = f"observation {turn} . "
        ids += context.first(user) if turn == 0 else context.next(response, user)  # noqa: F821
        messages.append({"role": "user", "content": user.strip()})
        text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ids == tok(text, add_special_tokens=False)["input_ids"]
        answer = f"<action>go {turn}</action>"
        response = tok(answer, add_special_tokens=False)["input_ids"]
        response += [] if turn == 1 else [tok.eos_token_id]  # turn 1 was cut before its end-of-turn token
        ids = ids + response
        messages.append({"role": "assistant", "content": answer})


def test_window_rows_hold_the_last_turns_only(tiny, loop):
    """One row per turn: task, the last `history` turns, the current observation; rebuilt from text every turn."""
    generate = says(tiny, "<action>a</action>", "<action>b</action>", "<action>c</action>")
    trajectory = run(loop(context="window", history=1, max_turn_tokens=64), generate, {"turns": 3})
    rows = rows_of(trajectory)
    assert [row.steps for row in rows] == [[0], [1], [2]]
    assert [row.tokens[: row.spans[0][0]] for row in rows] == [context for context, _, _ in generate.calls]
    prompts = [tiny.tokenizer.decode(step.prompt_ids) for step in trajectory.steps]
    assert "start here" in prompts[0] and "start here" in prompts[1] and "start here" not in prompts[2]
    assert "> b\n" in prompts[2] and "> a\n" not in prompts[2]
    assert [hidden_positions(row, trajectory, "prompt_end") for row in rows] == [
        [len(step.prompt_ids) - 1] for step in trajectory.steps
    ]
    assert [step.history_cut for step in trajectory.steps] == [0, 0, 0]


def test_a_window_prompt_over_budget_loses_its_oldest_turns_and_says_so(tiny, loop):
    texts = ["<action>" + "look " * 30 + "</action>"]
    roomy = run(loop(1024, context="window", history=3, max_turn_tokens=64), says(tiny, *texts), {"turns": 3})
    longest = [len(step.prompt_ids) for step in roomy.steps]
    assert longest[0] < longest[1] < longest[2] and summarise([roomy])["agent/cut_histories"] == 0
    # Room for one turn of history beside a whole response, not for two.
    room = longest[1] + 4
    tight = run(loop(room + 64, context="window", history=3, max_turn_tokens=64), says(tiny, *texts), {"turns": 3})
    assert [step.history_cut for step in tight.steps] == [0, 0, 1]
    assert len(tight.steps[2].prompt_ids) <= room
    assert summarise([tight])["agent/cut_histories"] == pytest.approx(1 / 3)


def test_a_template_that_rewrites_history_is_refused(tiny):
    """C14: Qwen3's template drops earlier <think> blocks. One message at a time it serves."""
    import copy

    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ValueError, match="changes earlier turns.*use --agent.context window"):
        ChatContext(tokenizer)
    assert ChatContext(tokenizer, grows=False).first("look") == ChatContext(tiny.tokenizer).first("look")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatContext(tokenizer)


def test_rollouts_survive_the_dump(tiny, loop, tmp_path):
    from openrlhf_bipace.rollout.dump import read_rollouts, write_rollouts

    trajectory = run(loop(), says(tiny, "<action>a</action>"), {"n": 1})
    write_rollouts(tmp_path / "r.parquet", [trajectory], {(0, 1): {"advantage": 0.5, "branch": "PACE"}})
    first, second = read_rollouts(tmp_path / "r.parquet")
    assert (first["advantage"], second["advantage"], second["branch"]) == (None, 0.5, "PACE")
    assert second["response_ids"] == trajectory.steps[1].response_ids
    assert first["task"] == '{"n": 1}' and first["end"] == "done" and second["success"]
