"""The pool: many episodes at once, and every way an environment can fail."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openrlhf_bipace import envs
from openrlhf_bipace.config import AgentConfig
from openrlhf_bipace.envs.pool import EnvFailure, EnvPool
from openrlhf_bipace.records import EndReason
from openrlhf_bipace.rollout.agent import AgentLoop, Generation
from openrlhf_bipace.rollout.summary import summarise

FILE = Path(__file__).parent / "faulty_env.py"
PROCESS, THREAD = f"{FILE}:Faulty", f"{FILE}:SafeFaulty"
BOTH = pytest.mark.parametrize("name", [PROCESS, THREAD], ids=["process", "thread"])


@pytest.fixture
def pool():
    """Make pools; they are closed at the end."""
    made = []

    def build(name=PROCESS, **options):
        made.append(EnvPool(name, **{"workers": 4, **options}))
        return made[-1]

    yield build
    for one in made:
        one.close()


async def episode(pool, task, steps=10):
    """Play up to `steps` commands; the texts seen, the first observation first."""
    async with pool.episode() as env:
        texts = [(await env.reset(task)).text]
        for _ in range(steps):
            result = await env.step("go")
            texts.append(result.text)
            if result.done:
                break
        return texts


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@BOTH
def test_workers_stay_warm(pool, name):
    """Episodes after one another reuse one worker; at once they use several."""
    p = pool(name)

    async def run():
        first = [(await episode(p, {}))[0] for _ in range(3)]
        return first, [texts[0] for texts in await asyncio.gather(*(episode(p, {}) for _ in range(4)))]

    first, together = asyncio.run(run())
    assert [text.split("episode ")[1] for text in first] == ["1", "2", "3"]
    assert len({text.split(" episode")[0] for text in first}) == 1
    assert p.counts["started"] == 4 and p.counts["episodes"] == 7
    if name == PROCESS:
        assert len({text.split(" episode")[0] for text in together}) == 4


def test_a_worker_loads_neither_torch_nor_the_parents_main(tmp_path):
    """Its interpreter holds the environment and little else."""
    (tmp_path / "nosy.py").write_text(
        "import sys\nfrom openrlhf_bipace.envs import Observation, TextEnv\n"
        "class Nosy(TextEnv):\n"
        "    def reset(self, task): return Observation(' '.join(sys.modules), '')\n"
        "    def step(self, text): raise NotImplementedError\n"
        "    @classmethod\n    def tasks(cls, split): return [{}]\n"
        "    @classmethod\n    def check_task(cls, task): pass\n"
    )

    async def modules():
        p = EnvPool(str(tmp_path / "nosy.py"))
        async with p.episode() as env:
            return set((await env.reset({})).text.split())

    loaded = asyncio.run(modules())
    assert not loaded & {"torch", "numpy", "ray", "vllm", "pytest", "transformers"}
    assert len(loaded) < 250


@BOTH
def test_64_at_once(pool, name):
    p = pool(name, workers=64)
    texts = asyncio.run(_gather(p, [{"turns": 5}] * 64))
    assert all(t[1:] == [f"turn {n}" for n in range(1, 6)] for t in texts)
    assert p.counts["started"] == 64
    assert len(p.pids()) == (64 if name == PROCESS else 0)


async def _gather(p, tasks):
    async def safe(task):
        try:
            return await episode(p, task)
        except EnvFailure as failure:
            return failure

    return await asyncio.gather(*(safe(task) for task in tasks))


@BOTH
def test_further_episodes_wait_for_a_free_worker(pool, name):
    p = pool(name, workers=2)
    outcomes = asyncio.run(_gather(p, [{"turns": 2}] * 9))
    assert len(outcomes) == 9 and all(len(texts) == 3 for texts in outcomes)
    assert p.counts["started"] == 2


FAULTS = {
    "raise": "OSError: the world broke (faulty_env.py:",
    "exit": "SystemExit: 3",
    "megabytes": "step returned 5,000,000 characters of text, allowed: 1,048,576",
    "none": "step returned str, allowed: StepResult",
    "nan": "reward: got nan, allowed: a finite number",
}


@BOTH
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_one_episode(pool, name, fault):
    """The others go on, the failed one's worker is replaced, the message says what happened."""
    p = pool(name, workers=3)
    tasks = [{"fault": fault, "at": 1} if n == 2 else {} for n in range(8)]
    outcomes = asyncio.run(_gather(p, tasks))
    failed = outcomes.pop(2)
    assert all(len(texts) == 4 for texts in outcomes)
    assert failed.reason is EndReason.ENV_ERROR and FAULTS[fault] in str(failed)
    assert p.counts["failed"] == 1 and p.counts["started"] == 4


@BOTH
def test_raising_in_reset(pool, name):
    p = pool(name)
    failed, fine = asyncio.run(_gather(p, [{"fault": "raise", "at": 0}, {}]))
    assert failed.reason is EndReason.ENV_ERROR and "the world broke" in str(failed)
    assert len(fine) == 4


@BOTH
def test_raising_at_the_start(pool, name):
    """A constructor that raises fails every episode, with its message, and never hangs."""
    p = pool(name, options={"data": "missing"})
    for failure in asyncio.run(_gather(p, [{}] * 6)):
        assert "FileNotFoundError: there are no games here" in str(failure)


@BOTH
@pytest.mark.parametrize("at", [0, 1])
def test_sleeping_for_ever(pool, name, at):
    """C19: the limit holds, the worker is replaced, the batch goes on. A process is killed, a thread left behind."""
    p = pool(name, workers=2, step_timeout=0.5, reset_timeout=3.0 if name == PROCESS else 0.5)
    before = []

    async def run():
        await _gather(p, [{}, {}])
        before.extend(p.pids())
        return await _gather(p, [{"fault": "sleep", "at": at}, *[{}] * 6])

    hung, *fine = asyncio.run(run())
    limit = f"{'step' if at else 'reset'} took over"
    assert hung.reason is EndReason.ENV_TIMEOUT and limit in str(hung)
    assert all(len(texts) == 4 for texts in fine)
    assert p.counts["failed"] == 1
    if name == PROCESS:
        (gone,) = set(before) - set(p.pids())
        wait_for(lambda: not alive(gone))


@pytest.mark.parametrize(("fault", "words"), [("die", "exited with status 7"), ("leak", "MemoryError")])
def test_a_dying_or_leaking_process(pool, fault, words):
    """The limit of memory is the kernel's: the allocation fails in that process, no other notices."""
    p = pool(memory_gib=0.25)
    failed, *fine = asyncio.run(_gather(p, [{"fault": fault, "at": 2}, {}, {}]))
    assert failed.reason is EndReason.ENV_ERROR and words in str(failed)
    assert all(len(texts) == 4 for texts in fine)


def test_a_process_that_grew_is_replaced_after_its_episode(pool):
    p = pool(memory_gib=0.125)
    outcomes = asyncio.run(_gather(p, [{"fault": "grow", "at": 1}]))
    assert len(outcomes[0]) == 4
    assert p.counts["recycled"] == 1 and p.counts["failed"] == 0


def test_kill_9_in_the_middle_of_an_episode(pool):
    p = pool(workers=2)

    async def victim():
        async with p.episode() as env:
            pid = int((await env.reset({"turns": 9})).text.split()[1])
            await env.step("go")
            os.kill(pid, signal.SIGKILL)
            await env.step("go")

    async def run():
        return await asyncio.gather(victim(), episode(p, {}), return_exceptions=True)

    killed, fine = asyncio.run(run())
    assert killed.reason is EndReason.ENV_ERROR and "was killed by SIGKILL" in str(killed)
    assert len(fine) == 4
    assert len(asyncio.run(episode(p, {}))) == 4


@BOTH
def test_workers_are_recycled(pool, name):
    p = pool(name, workers=1, recycle=2)

    async def run():
        return [(await episode(p, {}))[0].split("episode ")[1] for _ in range(5)]

    assert asyncio.run(run()) == ["1", "2", "1", "2", "1"]
    assert p.counts["recycled"] == 2


@BOTH
def test_a_cancelled_call_replaces_the_worker(pool, name):
    """The engine fails while an environment works: the worker is not handed to the next episode with a call open."""
    p = pool(name, workers=1)

    async def run():
        job = asyncio.create_task(episode(p, {"fault": "sleep", "at": 1}))
        while p.counts["episodes"] == 0 or not p._slots or next(iter(p._slots)).description is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        job.cancel()
        await asyncio.wait([job])
        return await episode(p, {})

    assert asyncio.run(run())[1:] == ["turn 1", "turn 2", "turn 3"]
    assert p.counts["failed"] == 1


def test_closing_ends_every_process(pool):
    p = pool()
    asyncio.run(_gather(p, [{}] * 4))
    pids = p.pids()
    assert len(pids) == 4 and all(map(alive, pids))
    p.close()
    wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_workers_die_with_their_parent(end, tmp_path):
    """Killed with -9 or just done, in the middle of a step that never returns."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\nfrom openrlhf_bipace.envs.pool import EnvPool\n"
        "async def main(p):\n"
        "    async with p.episode() as env:\n"
        "        print((await env.reset({'fault': 'sleep', 'at': 1})).text, flush=True)\n"
        "        job = asyncio.create_task(env.step('go'))\n"
        "        await asyncio.sleep(0.2)\n"
        "        if sys.argv[2] == 'exit': raise SystemExit\n"
        "        await job\n"
        "asyncio.run(main(EnvPool(sys.argv[1])))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(FILE.parent.parent)}
    parent = subprocess.Popen([sys.executable, str(script), PROCESS, end], env=env, stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline().split()[1])
    assert alive(worker)
    if end == "kill":
        parent.kill()
    parent.wait(timeout=20)
    wait_for(lambda: not alive(worker))


def test_through_the_agent_loop(tiny):
    """C18 and C19 as the trainer sees them: 6 of 8 kept, reasons and errors recorded with task and turn, counted."""
    config = AgentConfig(env=PROCESS, template="terse", step_timeout=1.0, env_workers=8)
    loop = AgentLoop(config, tiny.tokenizer, 4096)
    ids = tiny.tokenizer("<action>go</action>", add_special_tokens=False)["input_ids"]

    async def generate(context, budget, turn):
        return Generation(ids, "stop")

    async def run():
        tasks = [{"fault": {3: "raise", 5: "sleep"}.get(n), "at": 2, "n": n} for n in range(8)]
        return await asyncio.gather(*(loop.run(task, "g", n, generate) for n, task in enumerate(tasks)))

    trajectories = asyncio.run(run())
    loop.pool.close()
    assert [t.end for t in trajectories].count(EndReason.DONE) == 6
    assert trajectories[3].end is EndReason.ENV_ERROR and trajectories[5].end is EndReason.ENV_TIMEOUT
    assert "'n': 3" in trajectories[3].error and "turn 1" in trajectories[3].error
    assert "step took over 1.0 s" in trajectories[5].error
    figures = summarise(trajectories)
    assert (figures["agent/failed"], figures["agent/success"]) == (2, 1.0)


def test_members_do_not_wait_for_the_slowest(tiny):
    """A batch of 4 on 4 workers: the quick members and six more episodes finish while one is still playing."""
    loop = AgentLoop(AgentConfig(env="rooms", template="terse", env_workers=4, max_turns=2), tiny.tokenizer, 4096)
    tasks = envs.env_class("rooms").tasks("train")[:10]
    finished = []
    release = asyncio.Event()

    async def generate(context, budget, turn):
        return Generation([1], "length")

    async def slow(context, budget, turn):
        await release.wait()
        return Generation([1], "length")

    async def run():
        async def one(n):
            await loop.run(tasks[n], "g", n, slow if n == 0 else generate)
            finished.append(n)
            if len(finished) == 9:
                release.set()

        await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(10))), 30)

    asyncio.run(run())
    assert finished[-1] == 0


@pytest.mark.stack
def test_training_goes_on_around_a_broken_environment(tiny, helpers, tmp_path):
    """C18 and C19 in the trainer, on a user's own file: one task of four raises, one hangs. Two iterations are
    trained, the failed rollouts counted, left out and reported with task and turn."""
    tasks = [
        {"turns": 2},
        {"turns": 3, "fault": "raise", "at": 2},
        {"turns": 3, "fault": "sleep", "at": 1},
        {"turns": 4},
    ]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"input": "", "label": json.dumps(task)}) + "\n" for task in tasks * 2))
    flags = helpers.base_flags(tiny.folder, train, tmp_path)
    flags |= {"agent.env": PROCESS, "agent.step_timeout": 2, "agent.parser": "verl", "rollout.n_samples_per_prompt": 2}
    flags |= {"train.batch_size": 8, "ckpt.save_steps": -1}
    output = helpers.run_module("openrlhf_bipace.cli.train_ppo_ray", helpers.argv(flags), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert [(line["agent/trajectories"], line["agent/failed"], line["agent/success"]) for line in lines] == [
        (8, 4, 1)
    ] * 2
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert output.count("OSError: the world broke (faulty_env.py:") == 4
    assert output.count("step took over 2.0 s") == 4 and output.count("turn 1: OSError") == 4


# custom environments by path


def test_a_file_is_an_environment(tmp_path):
    assert envs.env_class(PROCESS).__name__ == "Faulty"
    assert envs.env_class(PROCESS) is envs.env_class(PROCESS)
    single = tmp_path / "single.py"
    single.write_text("from openrlhf_bipace.envs.rooms import RoomsEnv\nclass Mine(RoomsEnv):\n    max_turns = 3\n")
    assert envs.make(str(single)).max_turns == 3
    assert envs.absolute("rooms") == "rooms"
    assert envs.absolute("a/b.py:C") == f"{os.getcwd()}/a/b.py:C"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("/nowhere/env.py", "there is no file /nowhere/env.py"),
        (str(FILE), r"has 2 TextEnv classes \(Faulty, SafeFaulty\), name one"),
        (f"{FILE}:Missing", "Missing is no TextEnv class of the file; it defines: Faulty, SafeFaulty"),
        (f"{FILE}:StepResult", "StepResult is no TextEnv class"),
        ("rums", "unknown environment 'rums'; known: .*rooms.*, or path/to/file.py:ClassName"),
    ],
)
def test_an_unknown_environment_is_refused(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        envs.env_class(name)


def test_an_unfinished_class_is_refused(tmp_path):
    file = tmp_path / "half.py"
    file.write_text("from openrlhf_bipace.envs import TextEnv\nclass Half(TextEnv):\n    def reset(self, task): ...\n")
    with pytest.raises(ValueError, match="Half lacks check_task, step, tasks"):
        envs.env_class(str(file))


# what an answer may be


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"text": None}, "text: got NoneType, allowed: str"),
        ({"reward": None}, "reward: got None, allowed: a finite number"),
        ({"score": 1.5}, r"score: got 1.5, allowed: None or a number in \[0, 1\]"),
        ({"done": 1}, "done: got 1, allowed: True or False"),
        ({"success": True}, "success: got True without done"),
        ({"admissible": ("a",)}, "admissible: got tuple, allowed: a list of str"),
        ({"admissible": ["x" * 600_000] * 2}, r"1,200,005 characters of text, allowed: 1,048,576"),
    ],
)
def test_answers_are_checked(change, complaint):
    from openrlhf_bipace.envs.base import checked

    sound = {"text": "hello", "reward": 1, "done": False, "success": False, "valid": True, "executed": ""}
    assert checked("step", envs.StepResult(**sound)).reward == 1.0
    with pytest.raises((TypeError, ValueError), match=complaint):
        checked("step", envs.StepResult(**{**sound, **change}))
