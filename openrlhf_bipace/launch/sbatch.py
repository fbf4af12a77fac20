"""Texts of sbatch files. Pure: the same input gives the same text, so tests compare snapshots."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DIRECTIVE = re.compile(r"#SBATCH\s+--([a-z-]+)(?:=(.*))?$")


def directives(script: str) -> dict[str, str | None]:
    """``#SBATCH --name=value`` lines of a job script, in order; None for an option without a value."""
    return {m[1]: m[2] for line in script.splitlines() if (m := DIRECTIVE.match(line))}


def sbatch(options: Mapping[str, str | None], body: Sequence[str]) -> str:
    """A job script: its directives, strict mode, then `body`, one command a line."""
    header = [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options.items()]
    return "\n".join(["#!/usr/bin/env bash", *header, "set -euo pipefail", *body]) + "\n"


def command(words: Sequence[str]) -> str:
    """Words as one shell command, a flag and its values to a line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word if re.fullmatch(r'"\$\{?[A-Za-z_]+\}?"', word) else shlex.quote(word))
    return " \\\n    ".join(" ".join(line) for line in lines if line)


@dataclass(slots=True, frozen=True)
class Script:
    """A job script of one run, to be started by others with its directives."""

    text: str
    words: tuple[str, ...]  # its path and what always follows it
    root: str  # the repository, for BIPACE_ROOT

    def one(self, changes: Mapping[str, str | None], run_dir: str, flags: Sequence[str]) -> str:
        """A job that runs it in `run_dir` with further trainer `flags`; `changes` go over its own directives."""
        return self._job(changes, [f"export RUN_DIR={shlex.quote(run_dir)}"], flags)

    def array(self, changes: Mapping[str, str | None], folder: str, cells: Sequence[str], flags: Sequence[str]) -> str:
        """A job array whose task i runs ``cells[i]``, named "<estimator>-seed<seed>", in ``folder/cells[i]``."""
        choose = [
            f"CELLS=({' '.join(map(shlex.quote, cells))})",
            "CELL=${CELLS[$SLURM_ARRAY_TASK_ID]}",
            "ESTIMATOR=${CELL%-seed*}",
            "SEED=${CELL##*-seed}",
            f"export RUN_DIR={shlex.quote(folder)}/$CELL",
        ]
        return self._job(
            changes, choose, ["--algo.advantage.estimator", '"$ESTIMATOR"', "--train.seed", '"$SEED"', *flags]
        )

    def _job(self, changes: Mapping[str, str | None], body: Sequence[str], flags: Sequence[str]) -> str:
        start = [f"export BIPACE_ROOT={shlex.quote(self.root)}", *body, "exec bash " + command([*self.words, *flags])]
        return sbatch(directives(self.text) | dict(changes), start)


def report_job(name: str, log: str, root: str, words: Sequence[str], after: Sequence[str]) -> str:
    """A job of one CPU that runs `words` in `root` once the jobs `after` have ended, however they ended."""
    options = {"job-name": name, "nodes": "1", "ntasks": "1", "time": "00:30:00", "output": log}
    if after:
        options["dependency"] = f"afterany:{':'.join(after)}"
    return sbatch(options, [f"cd {shlex.quote(root)}", "exec " + command(words)])
