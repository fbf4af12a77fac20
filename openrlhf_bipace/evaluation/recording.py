"""Episodes recorded step by step and replayed under other circumstances: what `checker.py` checks with."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.envs.worker import ProcessWorker, WorkerError
from openrlhf_bipace.evaluation.baselines import random_command


class Fault(Exception):
    """A check failed."""


class NotApplicable(Exception):
    """There is nothing to check; the message says why."""


@dataclass(slots=True)
class Recording:
    """One episode as it was played."""

    task: dict[str, Any]
    start: envs.Observation
    commands: list[str] = field(default_factory=list)
    results: list[envs.StepResult] = field(default_factory=list)


@dataclass
class Patient:
    """The environment under examination.

    `seconds` limits a reset or a step; `recordings` are filled by the first check that plays.
    """

    name: str
    options: dict[str, Any]
    split: str
    episodes: int = 10
    seed: int = 0
    seconds: float = 60.0
    recordings: list[Recording] = field(default_factory=list)

    @property
    def cls(self) -> type[envs.TextEnv]:
        return envs.env_class(self.name)

    def make(self) -> envs.TextEnv:
        """An instance in this process."""
        return envs.make(self.name, **self.options)

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks to play, spread evenly over the split."""
        every = self.cls.tasks(self.split, **self.options)
        return every[:: -(-len(every) // self.episodes)] if every else []


class Probe:
    """An environment in a process of its own, with a time limit."""

    def __init__(self, patient: Patient) -> None:
        self.worker = ProcessWorker(patient.name, patient.options)
        self._seconds = patient.seconds

    def request(self, method: str, argument: Any) -> Any:
        """As the worker's; Fault for what it raises and for taking too long."""
        late = threading.Timer(self._seconds, self.worker.kill)
        late.start()
        begin = time.monotonic()
        try:
            return self.worker.request(method, argument)
        except WorkerError as error:
            if time.monotonic() - begin >= self._seconds:
                raise Fault(f"{method} of {argument!r} took over {self._seconds} s") from None
            raise Fault(f"{method} of {argument!r} failed: {error}") from error
        finally:
            late.cancel()

    def close(self) -> None:
        self.worker.close()


def record(probe: Probe, task: dict[str, Any], known: list[str], rng: random.Random) -> Recording:
    """Play random commands, those of the solution among them where nothing is said to be admissible."""
    limit = probe.request("describe", None)["max_turns"]
    recording = Recording(task, probe.request("reset", task))
    admissible, text = recording.start.admissible, recording.start.text
    for _ in range(limit):
        told = bool(admissible)
        command = rng.choice(known) if known and not told else random_command(rng, text, admissible)
        result = probe.request("step", command)
        check_step(command, result, admissible)
        recording.commands.append(command)
        recording.results.append(result)
        if result.done:
            break
        admissible, text = result.admissible, result.text
    return recording


def check_step(command: str, result: envs.StepResult, admissible: list[str]) -> None:
    if command in admissible and not result.valid:
        raise Fault(f"{command!r} is listed as admissible and was refused: {result.text[:100]!r}")
    if result.valid != bool(result.executed):
        raise Fault(
            f"{command[:40]!r}: valid is {result.valid}, executed is {result.executed[:40]!r}; one tells the other"
        )


def replay(request: Callable[[str, Any], Any], recording: Recording) -> None:
    for _ in replay_steps(request, recording):
        pass


def replay_steps(request: Callable[[str, Any], Any], recording: Recording) -> Iterator[None]:
    """Replay `recording`, one step at a time. Fault at the first difference."""
    pairs: list[tuple[str, Any, Any]] = [("reset", recording.task, recording.start)]
    pairs += [("step", c, result) for c, result in zip(recording.commands, recording.results, strict=True)]
    for turn, (method, argument, before) in enumerate(pairs):
        after = request(method, argument)
        for name in before.__dataclass_fields__:
            got, expected = getattr(after, name), getattr(before, name)
            if got != expected:
                raise Fault(
                    f"turn {turn} of {recording.task}: {name} is {str(got)[:80]!r}, the first time it was "
                    f"{str(expected)[:80]!r}"
                )
        yield
