"""The study's results as rows for CSV files and as a page of markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from openrlhf_bipace.lab.oracle import arms
from openrlhf_bipace.lab.oracle.arms import Arm, arm
from openrlhf_bipace.lab.oracle.measures import Measure
from openrlhf_bipace.lab.oracle.plan import MODEL, THINKING
from openrlhf_bipace.lab.oracle.setting import Result
from openrlhf_bipace.lab.oracle.size import Size

DIGITS = 4
# measure -> heading of the main tables
MAIN = {
    "mse": "MSE",
    "bias2": "bias²",
    "bias2_action": "of it by action",
    "variance": "variance",
    "step_corr": "corr.",
    "step_sign": "sign",
    "step_cos_action": "cos, action only",
    "step_cos_free": "cos, free reasoning",
    "step_cos_plan": "cos, plan",
    "step_pair_plan": "pair, plan",
    "total_cos_action": "total cos, action only",
    "total_cos_plan": "total cos, plan",
}
CHOICES = {
    "mse": "MSE",
    "step_corr": "corr.",
    "step_cos_action": "cos, action only",
    "step_cos_free": "cos, free reasoning",
    "step_cos_plan": "cos, plan",
    "total_cos_action": "total cos, action only",
    "total_cos_plan": "total cos, plan",
}
SWEPT = (
    "grpo", "gigpo", "hgpo", "pace_q", "bigpo", "bipace_q", "bipace_diff", "bipace_eb", "bipace_hgpo", "one_v",
    "one_nested", "state_v", "state_q", "state_nested",
)  # fmt: skip

Where = Callable[[Result], bool]


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row per arm and setting: every measure, and as ``<measure>_ci`` the half-width of its 95 % interval."""
    out = []
    for result in results:
        row = _head(result)
        for name, measure in result.measures.items():
            row |= {name: _round(measure.value), f"{name}_ci": _round(measure.half_width)}
        out.append(row | {name: _round(value) for name, value in result.described.items()})
    return out


def differences(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row per option of `arms.CHOICES`: each measure minus that of the default on the same resamples."""
    out = []
    for result, default in _choices(results):
        row = _head(result)
        for name, measure in result.measures.items():
            if name in default.measures:
                change = measure - default.measures[name]
                row |= {name: _round(change.value), f"{name}_ci": _round(change.half_width)}
        out.append(row)
    return out


def markdown(results: Sequence[Result], size: Size, seed: int, source: str) -> str:
    """The page: where it comes from (`source`: the commit), then a table for each question."""
    base = results[0].name
    parts = [
        "# Oracle tables",
        "What the columns mean and what to make of them: [docs/oracle.md](../oracle.md). Computed by "
        f"`bipace-study oracle` at commit {source}, seed {seed}, {size.resamples} resamples; ± is half a 95 % "
        "interval. Every measure: [oracle.csv](oracle.csv), [oracle_choices.csv](oracle_choices.csv).",
        f"## Base setting\n\n{_sentence(base)}",
        _table(results, base, arms.MAIN, MAIN),
        "## Group size\n\nCosine of the step part's gradient (`grpo`: the whole gradient) with the exact one, action "
        "only and with a plan token.",
        _sweep(results, "groups", base),
        "## Wordings\n\nThe same, by the number of texts that one state can show as.",
        _sweep(results, "texts_per_state", base),
    ]
    for policy in (MODEL, THINKING):
        for name in _settings(results, lambda r, policy=policy: r.name["policy"] == policy):
            parts += [f"## {policy.capitalize()}, {name['hidden_state']}\n\n{_sentence(name)}"]
            parts += [_table(results, name, arms.MAIN, MAIN)]
    parts += ["## Where the sources are silent\n\nChange against the default, paired on the same resamples. Bold: the "
              "interval excludes 0; a plain 0: no change to three digits."]  # fmt: skip
    pairs = _choices(results)
    for name in _settings([r for r, _ in pairs], lambda r: True):
        parts += [f"{_sentence(name)}", _choice_table([pair for pair in pairs if pair[0].name == name])]
    parts += ["## `--bipace.epsilon auto`\n\nEvery resample calibrated on its own, as the first iteration of a run.",
              _auto(results)]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def find(results: Iterable[Result], name: dict[str, Any], one: Arm) -> Result | None:
    """The result of `one` in the setting `name`."""
    return next((r for r in results if r.name == name and r.arm == one), None)


def _head(result: Result) -> dict[str, Any]:
    one = result.arm
    options = " ".join(f"{k}={v}" for k, v in one.options if k != "epsilon" or v == "auto")
    epsilon = "" if result.epsilon is None else result.epsilon
    return {**result.name, "seed": result.seed, "estimator": one.estimator, "options": options, "epsilon": epsilon}


def _choices(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    """(arm of `arms.CHOICES`, the same estimator with every default), in the settings that ran all of them."""
    chosen = set(arms.choice_arms())
    out = []
    for name in _settings(results, lambda r: r.arm in chosen):
        own = {r.arm: r for r in results if r.name == name}
        if chosen <= own.keys():
            out += [(r, own[arm(one.estimator)]) for one, r in own.items() if one in chosen]
    return out


def _settings(results: Sequence[Result], where: Where) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for result in results:
        if where(result) and result.name not in found:
            found.append(result.name)
    return found


def _sentence(name: dict[str, Any]) -> str:
    return (
        f"Policy: {name['policy']}; hidden states: {name['hidden_state']}; {name['tasks']} tasks × G = "
        f"{name['groups']}; {name['texts_per_state']} texts per state."
    )


def _table(results: Sequence[Result], name: dict[str, Any], wanted: Sequence[Arm], columns: dict[str, str]) -> str:
    found = [r for one in wanted if (r := find(results, name, one))]
    columns = {k: v for k, v in columns.items() if any(k in r.measures for r in found)}
    lines = [[f"`{r.arm.label}`", *(_cell(r.measures.get(k)) for k in columns)] for r in found]
    return _render(["estimator", *columns.values()], lines)


def _sweep(results: Sequence[Result], column: str, base: dict[str, Any]) -> str:
    same = [k for k in base if k != column]
    names = _settings(results, lambda r: all(r.name[k] == base[k] for k in same))
    names.sort(key=lambda name: name[column])
    lines = []
    for estimator in SWEPT:
        part = "total" if estimator == "grpo" else "step"
        line = [f"`{estimator}`"]
        for kind in ("action", "plan"):
            for name in names:
                found = find(results, name, arm(estimator))
                line.append(_cell(found and found.measures.get(f"{part}_cos_{kind}")))
        lines.append(line)
    word = {"groups": "G = ", "texts_per_state": "texts: "}[column]
    heads = [f"{word}{name[column]}{note}" for note in ("", ", plan") for name in names]
    return _render(["estimator", *heads], lines)


def _choice_table(pairs: Sequence[tuple[Result, Result]]) -> str:
    columns = {k: v for k, v in CHOICES.items() if any(k in r.measures for r, _ in pairs)}
    lines = []
    for r, d in pairs:
        line = [f"`{r.arm.label}`"]
        for k in columns:
            both = k in r.measures and k in d.measures
            line.append(_change(r.measures[k] - d.measures[k]) if both else "")
        lines.append(line)
    return _render(["option", *columns.values()], lines)


def _auto(results: Sequence[Result]) -> str:
    lines = []
    for result in results:
        if result.arm != arms.AUTO:
            continue
        name, scanned = result.name, [r for r in results if r.name == result.name and _scanned_q(r)]
        best = max(scanned, key=lambda r: r.measures["step_corr"].value)
        chosen = "–" if result.epsilon is None else f"{result.epsilon:g}"
        lines.append(
            [f"{name['policy']}, {name['hidden_state']}", f"{result.described['refused']:.0%}", chosen]
            + [_cell(result.measures["step_corr"]), f"{best.epsilon:g}", _cell(best.measures["step_corr"])]
        )
    heads = ["setting", "refused", "median ε where accepted", "corr.", "best ε of the scan", "corr. there"]
    return _render(heads, lines)


def _scanned_q(result: Result) -> bool:
    options = dict(result.arm.options)
    return result.arm.estimator == "bipace_q" and set(options) == {"epsilon"} and options["epsilon"] != "auto"


def _render(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def _cell(measure: Measure | None) -> str:
    return "" if measure is None else f"{measure.value:.3f} ± {measure.half_width:.3f}"


def _change(measure: Measure) -> str:
    if abs(measure.value) < 0.0005 and measure.half_width < 0.0005:
        return "0"
    text = f"{measure.value:+.3f} ± {measure.half_width:.3f}"
    return f"**{text}**" if abs(measure.value) > measure.half_width else text


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
