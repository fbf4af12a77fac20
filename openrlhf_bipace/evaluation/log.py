"""The episodes of one evaluation on disk: append-only JSON lines, so that a run that was cut short can go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf_bipace.records import EndReason, Trajectory


@dataclass(slots=True)
class Result:
    """One episode, as a line of the log."""

    task: int  # position in the list of tasks
    seed: int
    type: str  # kind of the task, as the environment names it
    success: bool
    score: float | None  # how much of the goal was met, where the environment grades that and the episode ended
    reward: float  # sum over the turns
    turns: int
    unparsed: int  # turns whose response did not parse into an action
    refused: int  # turns whose action the environment did not understand or allow
    end: str  # EndReason
    error: str  # of the environment, where the episode failed
    seconds: float

    @property
    def failed(self) -> bool:
        """The environment failed; the episode says nothing about the policy and is played again."""
        return EndReason(self.end).failed


def result_of(trajectory: Trajectory, task: int, seed: int, kind: str, seconds: float) -> Result:
    """What the log keeps of `trajectory`."""
    steps = trajectory.steps
    return Result(
        task=task,
        seed=seed,
        type=kind,
        success=trajectory.success,
        score=trajectory.score,
        reward=trajectory.reward,
        turns=len(steps),
        unparsed=sum(not s.valid for s in steps),
        refused=sum(s.valid and not s.accepted for s in steps),
        end=trajectory.end.value,
        error=trajectory.error,
        seconds=round(seconds, 3),
    )


class EpisodeLog:
    """The log of one evaluation.

    The first line says what is evaluated; every other line is a `Result`. A last line that was cut by a crash is
    dropped.

    Args:
        path: the file, made if need be.
        protocol: what the numbers depend on, as JSON values.

    Raises ValueError when the file holds episodes of another protocol, naming what differs, or a broken line.
    """

    def __init__(self, path: Path, protocol: dict[str, Any]) -> None:
        self.path = path
        self._found: dict[tuple[int, int], Result] = {}
        lines = self._whole_lines()
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"protocol": protocol}, sort_keys=True) + "\n")
            return
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                if number == 1:
                    self._compare(values["protocol"], json.loads(json.dumps(protocol)))
                else:
                    self._keep(Result(**values))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a line of an evaluation ({error})") from None

    def _whole_lines(self) -> list[str]:
        """The file's lines; what a crash left after the last line break is cut off."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self.path.write_bytes(whole)
        return whole.decode().splitlines()

    def _compare(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        for key in sorted(found.keys() | wanted.keys()):
            if found.get(key) != wanted.get(key):
                raise ValueError(
                    f"{self.path} holds episodes with {key} = {found.get(key)!r}, now it is {wanted.get(key)!r}; "
                    "take another --out"
                )

    def _keep(self, result: Result) -> None:
        """A later line replaces an earlier one of the same episode."""
        self._found[result.task, result.seed] = result

    def append(self, result: Result) -> None:
        """Write one episode down."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        self._keep(result)

    def done(self, task: int, seed: int) -> bool:
        """Is the episode there, and sound?"""
        result = self._found.get((task, seed))
        return result is not None and not result.failed

    def results(self) -> list[Result]:
        """Every episode, by task and seed."""
        return [self._found[key] for key in sorted(self._found)]
