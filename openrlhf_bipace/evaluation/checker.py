"""Plays an environment and holds what it does against its contract (`envs/base.py`): ``bipace-doctor env NAME``.

Episodes are recorded once in a process of their own and replayed under other circumstances, where they must come out
the same: another interpreter with another hash seed, another order, after abandoned episodes, beside a second
instance, in threads. To add a check: a function of a `Patient` that returns a remark or raises `Fault` or
`NotApplicable`, and a line in `CHECKS`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from openrlhf_bipace.envs.worker import WorkerError, explain, perform, resident_bytes
from openrlhf_bipace.evaluation.recording import (
    Fault,
    NotApplicable,
    Patient,
    Probe,
    check_step,
    record,
    replay,
    replay_steps,
)

ODD_TEXTS = (
    "",
    "   ",
    "xyzzy",
    "<action>look</action>",
    "go\nnorth",
    "去北边 ☃ \x00",
    "a" * 10_000,
    "{task} $task %s",
)
GROWTH = 1 << 20  # bytes an episode may leave behind
_WARM_UP, _RESETS = 30, 200  # episodes before and during the measurement of memory


@dataclass(slots=True)
class Finding:
    """Outcome of one check."""

    check: str
    ok: bool | None  # None: could not be checked
    remark: str


def examine(patient: Patient) -> Iterator[Finding]:
    """Run every check of `CHECKS`, one finding each as soon as it is known."""
    for name, check in CHECKS.items():
        if check is not check_tasks and check is not check_episodes and not patient.recordings:
            yield Finding(name, None, "not checked: no episode could be played")
            continue
        try:
            yield Finding(name, True, check(patient))
        except NotApplicable as reason:
            yield Finding(name, None, str(reason))
        except Fault as fault:
            yield Finding(name, False, str(fault))
        except (Exception, SystemExit) as error:
            yield Finding(name, False, explain(error))


def check_tasks(patient: Patient) -> str:
    """Tasks are JSON, accepted by check_task and the same every time; what is malformed is a ValueError."""
    tasks = patient.cls.tasks(patient.split, **patient.options)
    if not tasks:
        raise Fault(f"tasks({patient.split!r}) is empty")
    if tasks != patient.cls.tasks(patient.split, **patient.options):
        raise Fault(f"tasks({patient.split!r}) gives another list the second time")
    for number, task in enumerate(tasks):
        if not isinstance(task, dict) or json.loads(json.dumps(task)) != task:
            raise Fault(f"task {number} does not survive JSON: {task!r}")
        patient.cls.check_task(task)
    for what, call in (
        ("tasks('no such split')", lambda: patient.cls.tasks("no such split", **patient.options)),
        ("check_task({'no such key': 1})", lambda: patient.cls.check_task({"no such key": 1})),
    ):
        try:
            call()
        except ValueError:
            continue
        except Exception as error:
            raise Fault(f"{what} raised {explain(error)}, allowed: ValueError") from error
        if what.startswith("tasks"):
            raise Fault(f"{what} was accepted, allowed: ValueError")
    return f"{len(tasks)} in split {patient.split!r}"


def check_episodes(patient: Patient) -> str:
    """Random episodes in a process of their own keep every rule of the contract, step by step."""
    rng = random.Random(patient.seed)
    probe = Probe(patient)
    player = patient.make()
    try:
        for task in patient.tasks():
            patient.recordings.append(record(probe, task, player.solution(task) or [], rng))
    finally:
        probe.close()
        player.close()
    steps = [result for recording in patient.recordings for result in recording.results]
    won = sum(r.results[-1].success for r in patient.recordings if r.results)
    invalid = sum(not result.valid for result in steps)
    return f"{len(patient.recordings)} random episodes, {won} won, {len(steps)} steps, {invalid} refused"


def check_scripted(patient: Patient) -> str:
    """The environment's own solution wins."""
    env, known = patient.make(), 0
    for recording in patient.recordings:
        commands = env.solution(recording.task)
        if commands is None:
            continue
        known += 1
        env.reset(recording.task)
        result = None
        for command in commands:
            result = perform(env, "step", command)
            if result.done:
                break
        if result is None or not result.success:
            raise Fault(f"the solution of {recording.task} does not win: {commands}")
        if len(commands) > env.max_turns:
            raise Fault(f"the solution of {recording.task} takes {len(commands)} turns, max_turns is {env.max_turns}")
    env.close()
    if not known:
        raise NotApplicable("the environment knows no solutions")
    return f"{known} solutions win"


def check_determinism(patient: Patient) -> str:
    """Another interpreter (another hash seed), the other order, an abandoned episode before each: all the same."""
    probe = Probe(patient)
    try:
        for recording in reversed(patient.recordings):
            probe.request("reset", patient.recordings[0].task)
            replay(probe.request, recording)
    finally:
        probe.close()
    return f"{len(patient.recordings)} episodes came out the same in another process and order"


def check_visit_seed(patient: Patient) -> str:
    """Another visit_seed may change the wording and nothing else."""
    env, texts = patient.make(), 0
    for recording in patient.recordings:
        start = perform(env, "reset", {**recording.task, "visit_seed": 12345})
        texts += start.text != recording.start.text
        for turn, (command, before) in enumerate(zip(recording.commands, recording.results, strict=True)):
            after = perform(env, "step", command)
            texts += after.text != before.text
            for name in ("reward", "done", "success", "valid", "executed", "state_id", "admissible"):
                if getattr(after, name) != getattr(before, name):
                    raise Fault(
                        f"visit_seed changes {name} from {getattr(before, name)!r} to {getattr(after, name)!r} "
                        f"(turn {turn} of {recording.task})"
                    )
    env.close()
    return "it varies the wording" if texts else "it changes nothing"


def check_after_the_end(patient: Patient) -> str:
    """A step after the end raises or stays over, without another reward."""
    env, ended = patient.make(), 0
    for recording in patient.recordings:
        commands = env.solution(recording.task) or recording.commands
        env.reset(recording.task)
        if not any(env.step(command).done for command in commands):
            continue
        ended += 1
        try:
            result = env.step(commands[-1])
        except Exception:
            continue
        if not result.done or result.reward:
            raise Fault(f"a step after the end gave done {result.done} and reward {result.reward}")
    env.close()
    if not ended:
        raise NotApplicable("no episode came to its end")
    return f"{ended} episodes stay over"


def check_any_text(patient: Patient) -> str:
    """No text makes the environment raise."""
    env = patient.make()
    for text in ODD_TEXTS:
        env.reset(patient.recordings[0].task)
        try:
            result = perform(env, "step", text)
        except WorkerError as error:
            raise Fault(f"{text[:40]!r} raised {error}") from error
        check_step(text, result, [])
    env.close()
    return f"{len(ODD_TEXTS)} odd texts were survived"


def check_instances(patient: Patient) -> str:
    """Two instances, a step here and a step there, do not disturb each other; close may come twice."""
    pair = patient.make(), patient.make()
    for recording in patient.recordings:
        runs = [replay_steps(partial(perform, env), recording) for env in pair]
        for _ in zip(*runs, strict=True):
            pass
    for env in (*pair, *pair):
        env.close()
    return "two at once do not disturb each other, close may come twice"


def check_threads(patient: Patient) -> str:
    """With `thread_safe`: the recordings replay in eight threads at once."""
    if not patient.cls.thread_safe:
        raise NotApplicable("thread_safe is False: every environment gets a process")

    def play(shift: int) -> None:
        env = patient.make()
        for recording in patient.recordings[shift:] + patient.recordings[:shift]:
            replay(lambda method, argument: perform(env, method, argument), recording)
        env.close()

    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(play, range(8)):
            pass
    return "eight threads at once do not disturb each other"


def check_speed(patient: Patient) -> str:
    """For information: how long the recordings take in this process."""
    env, reset, step, steps = patient.make(), 0.0, 0.0, 0
    for recording in patient.recordings:
        begin = time.perf_counter()
        env.reset(recording.task)
        middle = time.perf_counter()
        for command in recording.commands:
            env.step(command)
        reset, step = reset + middle - begin, step + time.perf_counter() - middle
        steps += len(recording.commands)
    env.close()
    rate = steps / step if steps else 0.0
    return f"{len(patient.recordings) / reset:,.0f} resets/s, {rate:,.0f} steps/s in one process, caches warm"


def check_memory(patient: Patient) -> str:
    """A process that plays on and on does not grow by more than `GROWTH` per episode."""
    probe = Probe(patient)
    try:
        for episode in range(_WARM_UP + _RESETS):
            if episode == _WARM_UP:
                before = resident_bytes(probe.worker.pid)
            recording = patient.recordings[episode % len(patient.recordings)]
            probe.request("reset", recording.task)
            for command in recording.commands[:3]:
                probe.request("step", command)
        growth = (resident_bytes(probe.worker.pid) - before) / _RESETS
    finally:
        probe.close()
    remark = f"{growth / 1024:.1f} KiB per episode over {_RESETS} episodes, {before >> 20} MiB at their start"
    if growth > GROWTH:
        raise Fault(f"grows by {remark}")
    return remark


CHECKS: dict[str, Callable[[Patient], str]] = {
    "tasks": check_tasks,
    "random episodes": check_episodes,
    "scripted episodes": check_scripted,
    "determinism": check_determinism,
    "visit_seed": check_visit_seed,
    "after the end": check_after_the_end,
    "any text": check_any_text,
    "instances": check_instances,
    "threads": check_threads,
    "speed": check_speed,
    "memory": check_memory,
}
