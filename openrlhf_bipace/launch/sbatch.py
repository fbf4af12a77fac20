"""Texts of sbatch files. Pure: the same input gives the same text, so tests compare snapshots."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

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


def run_script(base: str, path: str, changes: Mapping[str, str | None], run_dir: str, flags: Sequence[str]) -> str:
    """A job that runs the job script at `path` (its text is `base`) in `run_dir` with further trainer `flags`.

    `changes` go over the script's own directives.
    """
    options = directives(base) | dict(changes)
    return sbatch(options, [f"export RUN_DIR={shlex.quote(run_dir)}", "exec bash " + command([path, *flags])])


def run_array(
    base: str, path: str, changes: Mapping[str, str | None], folder: str, cells: Sequence[str], flags: Sequence[str]
) -> str:
    """Like `run_script` for a job array: task i runs ``cells[i]``, "<estimator>-seed<seed>", in its own folder."""
    return sbatch(
        directives(base) | dict(changes),
        [
            f"CELLS=({' '.join(map(shlex.quote, cells))})",
            "CELL=${CELLS[$SLURM_ARRAY_TASK_ID]}",
            "ESTIMATOR=${CELL%-seed*}",
            "SEED=${CELL##*-seed}",
            f"export RUN_DIR={shlex.quote(folder)}/$CELL",
            "exec bash "
            + command([path, "--algo.advantage.estimator", '"$ESTIMATOR"', "--train.seed", '"$SEED"', *flags]),
        ],
    )


def report_job(name: str, log: str, root: str, words: Sequence[str], after: Sequence[str]) -> str:
    """A job of one CPU that runs `words` in `root` once the jobs `after` have ended, however they ended."""
    options = {"job-name": name, "nodes": "1", "ntasks": "1", "time": "00:30:00", "output": log}
    if after:
        options["dependency"] = f"afterany:{':'.join(after)}"
    return sbatch(options, [f"cd {shlex.quote(root)}", "exec " + command(words)])
