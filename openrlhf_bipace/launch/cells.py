"""A study on a cluster: named runs in one folder, which of them are done, and handing the rest to sbatch."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from openrlhf_bipace.launch.sbatch import Script, report_job

ROOT = Path(__file__).parents[2]  # where slurm/ and openrlhf_bipace/ are
JOBS = "jobs.json"  # cell -> id of the job last submitted for it


@dataclass(slots=True, frozen=True)
class State:
    """How a cell stands: word is "finished", "failed", "waiting" (queued or running), "lost" or "missing"."""

    word: str
    reason: str = ""

    @property
    def open(self) -> bool:
        """It has to be (re)submitted."""
        return self.word in ("failed", "lost", "missing")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that every study on a cluster has."""
    parser.add_argument("--script", type=Path, default=Path("slurm/bipace_1_5b.sh"), help="job script of one run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the study; the same one fills its holes")
    parser.add_argument("--environment", default="", help="first word after the script (alfworld, webshop, textcraft)")
    parser.add_argument("--trainer", default="", help="further trainer flags, as one quoted text")
    parser.add_argument("--write_only", action="store_true", help="write the sbatch files, submit nothing")
    parser.add_argument("--report", action="store_true", help="only collect what is there and write the report")


class Study:
    """The folder of a study. `submit` needs sbatch, `state` asks squeue where a cell has no outcome yet."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder = args.out.absolute()
        self.flags = shlex.split(args.trainer)
        if not args.report:
            self.script = _script(args.script, args.environment)
        (self.folder / "jobs").mkdir(parents=True, exist_ok=True)

    def jobs(self) -> dict[str, str]:
        """Cell -> id of the job last submitted for it."""
        file = self.folder / JOBS
        return json.loads(file.read_text()) if file.exists() else {}

    def states(self, cells: list[str]) -> dict[str, State]:
        """How each cell stands."""
        jobs = self.jobs()
        queued = _queued() if jobs else set()
        return {cell: self._state(cell, jobs.get(cell), queued) for cell in cells}

    def _state(self, cell: str, job: str | None, queued: set[str]) -> State:
        if job in queued:
            return State("waiting", f"job {job}")
        attempts = sorted((self.folder / cell / "slurm").glob("*.*"), key=_job_and_restart)
        if not attempts:
            return State("lost", f"job {job} never started") if job else State("missing")
        outcome = attempts[-1] / "outcome"
        if not outcome.exists():
            return State("lost", f"{attempts[-1].name} left no outcome")
        code, _, reason = outcome.read_text().strip().partition(" ")
        return State("finished") if code == "0" else State("failed", f"exit {code}: {reason}")

    def submit(self, name: str, text: str, cells: dict[str, str]) -> str:
        """Write ``jobs/<name>.sbatch``, hand it to sbatch, note the job of every cell; the job's id.

        Args:
            cells: cell -> what follows the job's id in squeue, "" or "_<array index>".
        """
        job = _run("sbatch", "--parsable", str(self.write(name, text))).split(";")[0]
        jobs = self.jobs() | {cell: job + suffix for cell, suffix in cells.items()}
        (self.folder / JOBS).write_text(json.dumps(jobs, indent=2, sort_keys=True) + "\n")
        return job

    def write(self, name: str, text: str) -> Path:
        """``jobs/<name>.sbatch``."""
        file = self.folder / "jobs" / f"{name}.sbatch"
        file.write_text(text)
        return file

    def log(self, name: str) -> str:
        """sbatch's --output for a job."""
        return str(self.folder / "jobs" / f"{name}.log")

    def report_after(self, submitted: list[str], states: dict[str, State], study: str, *options: str) -> None:
        """Write ``jobs/report.sbatch``; if jobs were submitted, hand it in behind them and those that still wait."""
        jobs = self.jobs()
        waiting = [jobs[cell] for cell, state in states.items() if state.word == "waiting"]
        words = [sys.executable, "-m", "openrlhf_bipace.cli.study", study, "--out", str(self.folder), "--report"]
        text = report_job("report", self.log("report"), str(ROOT), [*words, *options], [*submitted, *waiting])
        if submitted:
            self.submit("report", text, {})
        else:
            self.write("report", text)


def _script(path: Path, environment: str) -> Script:
    if not path.is_file():
        raise ValueError(f"--script: got {str(path)!r}, allowed: a job script")
    path = path.absolute()
    words = (str(path), environment) if environment else (str(path),)
    return Script(path.read_text(), words, str(ROOT))


def _job_and_restart(attempt: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in attempt.name.split("."))


def _queued() -> set[str]:
    """Ids of this user's jobs and array tasks in the queue, e.g. "17" and "18_3"."""
    return set(_run("squeue", "--me", "--noheader", "--array", "--format=%i").split())


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, text=True, capture_output=True, timeout=120)
    except FileNotFoundError:
        raise ValueError(f"{words[0]} is not installed here; --write_only writes the files without it") from None
    if done.returncode:
        raise ValueError(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
