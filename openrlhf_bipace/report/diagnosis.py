"""The partition's diagnostics of a run beside the paper's values, and its health."""

from __future__ import annotations

from openrlhf_bipace.advantages import diagnostics
from openrlhf_bipace.report.load import Run
from openrlhf_bipace.report.numbers import DASH, OWN, WINDOW, mean, percent
from openrlhf_bipace.rollout import health as vital_signs

# bipace/ name -> (words, the value is a share)
DIAGNOSTICS = {
    "cluster_singleton_rate": ("singleton clusters, share of clusters", True),
    "row_singleton_rate": ("steps alone in their cluster, share of steps", True),
    "cluster_size_mean": ("mean cluster size, steps", False),
    "cluster_size_p90": ("90th percentile of the cluster size, steps", False),
    "giant_share": ("largest cluster, share of its group's steps", True),
    "matched_pairs": ("matched pairs per iteration", False),
    "rows_pace": ("steps judged against peers by action", True),
    "rows_fallback": ("steps in the fallback (leave-one-out)", True),
    "rows_singleton": ("steps alone in their cluster", True),
    "clusters_multi_key": ("clusters of at least 2 steps with at least 2 actions", True),
    "keys_per_cluster": ("actions per cluster", False),
    "parse_rate": ("responses with a valid action", True),
    "return_std_within": ("std of the return within clusters", False),
    "step_share_zero": ("step advantages that are exactly 0", True),
    "epsilon": ("epsilon", False),
    "r2": ("R² of predicting a return from other trajectories' steps of the cluster", False),
    "r2_refused": ("iterations whose calibration was refused", True),
    "purity": ("purity: steps in the most frequent true state of their cluster", True),
    "clusters": ("clusters per iteration", False),
    "steps": ("steps per iteration", False),
    "groups": ("prompt groups per iteration", False),
    "groups_without_signal": ("groups whose advantages are all 0", False),
}
KNOWN_ELSEWHERE = ("groups_of_one", "trajectories", "trajectories_failed", "trajectories_empty")


def table(run: Run) -> list[str]:
    """Markdown lines: one row per diagnostic of the run's last iterations; a sentence if there are none."""
    last = run.training[-WINDOW:]
    logged = {name.removeprefix("bipace/") for line in last for name in line if name.startswith("bipace/")}
    logged -= {name for name in logged if f"bipace/{name}".startswith(OWN)} | set(KNOWN_ELSEWHERE)
    names = [name for name in DIAGNOSTICS if name in logged] + sorted(logged - set(DIAGNOSTICS))
    if not names:
        return [f"None: the estimator `{run.estimator}` has no step part."]
    paper = {task: parts[run.partition] for task, parts in diagnostics.PAPER.items() if run.partition in parts}
    lines = [f"Mean over the last {len(last)} iterations." if len(last) > 1 else "Of the only iteration."]
    if paper:
        lines[0] += (
            " The paper's columns are its tables L.1 to L.3: a 7B model on its own tasks, so a scale and no target."
        )
    headers = ["diagnostic", "this run", *(f"paper, {task}" for task in paper)]
    lines += ["", "| " + " | ".join(headers) + " |", "|---|" + "--:|" * (len(headers) - 1)]
    for name in names:
        words, share = DIAGNOSTICS.get(name, (f"`bipace/{name}`", False))
        cells = [_format(mean(last, f"bipace/{name}"), share)]
        cells += [_paper(name, values.get(name), share) for values in paper.values()]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return lines


def health(run: Run) -> list[str]:
    """Markdown lines: the health figures of the first and the last iterations and where each would alarm."""
    first, last = run.training[:WINDOW], run.training[-WINDOW:]
    lines = ["| figure | first iterations | last iterations | alarm |", "|---|--:|--:|---|"]
    for name, (limit, side, meaning) in vital_signs.ALARMS.items():
        share = side > 0
        cells = [_format(mean(part, name), share) for part in (first, last)]
        if cells[1] != DASH:
            bound = f"{'above' if share else 'below'} {_format(limit, share)}: {meaning}"
            lines.append(f"| `{name}` | {cells[0]} | {cells[1]} | {bound} |")
    return lines if len(lines) > 2 else ["None was logged."]


def warnings(run: Run) -> list[str]:
    """Markdown lines: what the last iteration's diagnostics and health figures warn of."""
    last = run.training[-1] if run.training else {}
    found = [*diagnostics.warnings(last), *vital_signs.alarms(last)]
    return [f"- {warning[0].upper()}{warning[1:]}." for warning in found] or ["None for the last iteration."]


def _paper(name: str, value: float | None, share: bool) -> str:
    return ("> " if name == "parse_rate" and value is not None else "") + _format(value, share)


def _format(value: float | None, share: bool) -> str:
    if value is None:
        return DASH
    if share:
        return percent(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
