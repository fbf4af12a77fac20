"""report.md: the text of a report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from openrlhf_bipace.config import SECTIONS
from openrlhf_bipace.report import diagnosis, episode
from openrlhf_bipace.report.load import Run
from openrlhf_bipace.report.numbers import (
    DASH,
    PHASES,
    Phase,
    duration,
    held_out,
    outcome,
    percent,
    phases,
    side_by_side,
)
from openrlhf_bipace.rollout.dump import read_rollouts

# Words -> the flags that say it, upstream's and ours.
SETTINGS = {
    "environment": ("agent.env", "agent.context", "agent.history", "agent.template", "agent.max_turns"),
    "model": ("actor.model_name_or_path",),
    "data": ("data.prompt_dataset", "eval.dataset"),
    "batch": ("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size"),
    "optimiser": ("actor.adam.lr", "actor.lr_scheduler", "algo.kl.init_coef", "algo.kl.use_loss", "ds.zero_stage"),
    "sampling": ("rollout.temperature", "eval.temperature", "eval.n_samples_per_prompt", "train.seed"),
}
SECRET = ".key"  # how flags end whose value stays out of a report, as --logger.wandb.key
FORWARD = 0.113  # share of a step the paper's second forward takes


def report(runs: Sequence[Run], folder: Path, curve: str) -> str:
    """The whole text. `folder` is where it will lie, `curve` the picture beside it."""
    lines = [f"# {'Run' if len(runs) == 1 else 'Runs'} {', '.join(run.name for run in runs)}", ""]
    lines += [_summary(run) for run in runs]
    lines += ["", f"![Success and partition over the iterations]({curve})", "", "## Outcome", "", *_outcome(runs)]
    for run in runs:
        level, title = ("##", "") if len(runs) == 1 else ("###", f" of {run.name}")
        lines += ["", f"## {run.name}"] if len(runs) > 1 else []
        sections = {
            "What was run": _settings(run),
            "Time per iteration": _time(run),
            "Diagnostics": diagnosis.table(run) if run.training else ["No iteration was finished."],
            "Health": diagnosis.health(run),
            "Warnings": diagnosis.warnings(run),
            "An episode": _episode(run),
            "Files": _files(run, folder, curve),
        }
        for heading, body in sections.items():
            lines += ["", f"{level} {heading}{title}", "", *body]
    return "\n".join(lines) + "\n"


def _summary(run: Run) -> str:
    tests = held_out(run)
    text = f"- **{run.name}**: `{run.estimator}` on `{run.flag('agent.env', '') or 'no environment of ours'}`, "
    text += f"{len(run.training)} iteration{'s' if len(run.training) != 1 else ''}"
    if not tests:
        return text + "; no held-out evaluation."
    if len(tests) == 1:
        return text + f"; held-out success {tests[0]}."
    low, high = tests[-1].interval
    apart = low > tests[0].interval[1] or high < tests[0].interval[0]
    meaning = "do not overlap" if apart else "overlap, so chance may explain the difference"
    text += f"; held-out success {percent(tests[0].share)} → {percent(tests[-1].share)}"
    return text + (f" (the 95 % intervals {meaning})." if tests[0].share != tests[-1].share else ", no change.")


def _outcome(runs: Sequence[Run]) -> list[str]:
    table = _table(["", *(run.name for run in runs)], side_by_side([outcome(run) for run in runs]))
    notes = ["Arrows go from the mean of the first iterations to the mean of the last."]
    notes.append("Training time is the sum of the iterations, without start-up, evaluations and checkpoints.")
    if any(held_out(run) for run in runs):
        notes.append("Intervals are Wilson's and take episodes as independent; those of one task are not quite.")
    return [*table, "", " ".join(notes)]


def _settings(run: Run) -> list[str]:
    if not run.config:
        return ["config.json is missing, so the flags are unknown."]
    rows = [("estimator", [f"`{run.estimator}`" + ("" if run.ours else " (OpenRLHF's own)")])]
    for words, names in SETTINGS.items():
        known = [f"`--{name} {run.flag(name)}`" for name in names if run.flag(name) not in (None, "")]
        rows += [(words, ["<br>".join(known)])] if known else []
    shown = {name for names in SETTINGS.values() for name in names} | {"bipace.run_dir"}
    changed = [flag for name, flag in _changed(run) if name not in shown]
    rows.append(("our other flags not at their default", ["<br>".join(changed) or "none"]))
    versions = run.config.get("versions", {})
    rows.append(("versions", [", ".join(f"{name} {version}" for name, version in versions.items()) or DASH]))
    lines = _table(["", "value"], rows)
    command = run.config.get("command")
    if command:
        lines += [
            "",
            "<details><summary>Command</summary>",
            "",
            "```",
            shlex.join(_without_secrets(command)),
            "```",
            "</details>",
        ]
    return lines


def _without_secrets(command: Sequence[str]) -> list[str]:
    """The command without values of flags such as --logger.wandb.key: reports get shared."""
    out: list[str] = []
    for word in map(str, command):
        flag, equals, _ = word.partition("=")
        if out and out[-1].startswith("--") and out[-1].endswith(SECRET):
            word = "HIDDEN"
        elif equals and flag.startswith("--") and flag.endswith(SECRET):
            word = f"{flag}=HIDDEN"
        out.append(word)
    return out


def _changed(run: Run) -> list[tuple[str, str]]:
    """(name, flag with its value) of every flag of ours that is not at its default."""
    out = []
    for section, cls in SECTIONS.items():
        for field in fields(cls):
            name = f"{section}.{field.name}"
            value = run.flag(name, field.default)
            if value != field.default:
                out.append((name, f"`--{name} {value}`"))
    return out


def _time(run: Run) -> list[str]:
    found = phases(run)
    if not found:
        return ["No times were logged."]
    text = "The only iteration, warm-up included."
    if len(run.training) > 1:
        first = run.training[0].get("timing/step_total")
        warm = f" ({duration(first)})" if first is not None else ""
        text = f"Mean of every iteration but the first{warm}, which warms up."
    rows = []
    for phase in found:
        words = PHASES[phase.name]
        words = ("&nbsp;&nbsp;&nbsp;" if words.startswith("of which") else "") + words
        rows.append((words, [f"{phase.seconds:.3g}", f"{100 * phase.share:.2f} %"]))
    out = [text, "", *_table(["phase", "mean seconds", "share"], rows, numbers=True)]
    own = [phase for phase in found if phase.own]
    return [*out, "", _own_part(own, found[-1].seconds)] if own else out


def _own_part(own: Sequence[Phase], iteration: float) -> str:
    share, seconds = sum(phase.share for phase in own), sum(phase.seconds for phase in own)
    text = f"BiPACE's own part is {100 * share:.2f} % of an iteration ({seconds:.3g} s of {iteration:.3g} s)"
    if any(phase.name == "bipace/seconds_hidden" for phase in own):
        text += (
            f"; the paper reports {percent(FORWARD)} for its second forward. Hidden-state capture is summed over the "
            "policy's ranks and, on a GPU, includes waiting for the forward to reach the layer: an upper bound"
        )
    return text + "."


def _episode(run: Run) -> list[str]:
    dump = episode.latest_dump(run)
    if dump is None:
        return ["There is no rollout dump."]
    try:
        turns = read_rollouts(dump)
    except (OSError, ValueError) as error:  # what a run that was killed while writing leaves
        return [f"`rollouts/{dump.name}` cannot be read ({type(error).__name__})."]
    if not turns:
        return [f"`rollouts/{dump.name}` holds no turn."]
    text = f"From `rollouts/{dump.name}`."
    if run.ours:
        text += (
            " The return is discounted per turn and includes the penalty of invalid turns; steps with one cluster "
            "number were compared with each other (in brackets: how many); the advantage is what the turn's response "
            "tokens were trained with."
        )
    return [text, "", *episode.table(episode.pick(turns), turns)]


def _files(run: Run, folder: Path, curve: str) -> list[str]:
    dumps, path = run.folder.rollouts, run.folder.path
    known = {
        path / "config.json": "every flag, the command, versions",
        path / "metrics.jsonl": "one line an iteration or evaluation",
        path / "epsilon.json": "what `--bipace.epsilon auto` chose, and the curve it chose from",
        dumps: f"{len(list(dumps.glob('step_*.parquet')))} dumps of training rollouts (`step_*.parquet`) and "
        f"{len(list(dumps.glob('eval_*.parquet')))} of evaluations (`eval_*.parquet`), one row a turn",
    }
    lines = ["- report.md: this page", f"- [{curve}]({curve}): the picture above"]
    for file, words in known.items():
        if file.exists():
            link = Path(os.path.relpath(file.resolve(), folder.resolve())).as_posix()
            lines.append(f"- [{file.name}{'/' if file.is_dir() else ''}]({link}): {words}")
    model = run.flag("ckpt.output_dir")
    return lines + ([f"- `{model}`: the trained model (`--ckpt.output_dir`)"] if model else [])


def _table(headers: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], numbers: bool = False) -> list[str]:
    """Markdown lines; cells may hold code spans, a pipe in them is escaped."""
    lines = ["| " + " | ".join(headers) + " |", "|---|" + ("--:|" if numbers else "---|") * (len(headers) - 1)]
    for name, cells in rows:
        lines.append("| " + " | ".join([name, *(cell.replace("|", "\\|") for cell in cells)]) + " |")
    return lines
