"""Signs of a run going wrong: each figure by hand, each alarm at its limit."""

from __future__ import annotations

import pytest

from openrlhf_bipace.records import EndReason, StepRecord, Trajectory
from openrlhf_bipace.rollout.health import ALARMS, alarms, examine, staleness
from openrlhf_bipace.runs import RunFolder


def turn(ids, valid=True, accepted=True, finish="stop", weights=0) -> StepRecord:
    return StepRecord(0, "o", [1], ids, True, "", "a", valid, 0.0, finish, accepted=accepted, weights=weights)


def test_figures_by_hand():
    steps = [
        turn([7] * 8),  # one token, eight times
        turn([7] * 7),  # too short to tell
        turn([7] * 5 + [1, 2, 3, 4, 5], valid=False, accepted=False, finish="length"),  # half is not more than half
        turn([1, 2, 3], accepted=False),
    ]
    group = [
        Trajectory("g", 0, {}, steps, EndReason.TURN_LIMIT),
        Trajectory("g", 1, {}, [turn([1])]),
        Trajectory("g", 2, {}, [turn([9] * 9)], EndReason.ENV_ERROR),  # does not count
        Trajectory("g", 3, {}, [], EndReason.CONTEXT_FULL),  # nor does this
    ]
    assert examine(group, {"bipace/groups": 4.0, "bipace/groups_without_signal": 3.0}) == {
        "health/repetitive": 1 / 5,
        "health/refused_actions": 2 / 5,
        "health/truncated": 1 / 2,
        "health/cut_responses": 1 / 5,
        "health/groups_without_signal": 3 / 4,
    }
    assert examine([], {}) == {} and "health/groups_without_signal" not in examine(group, {})


@pytest.mark.parametrize("name", ALARMS)
def test_an_alarm_rings_beyond_its_limit_and_not_at_it(name):
    limit, side, meaning = ALARMS[name]
    assert alarms({name: limit}) == []
    (sentence,) = alarms({name: limit + 0.005 * side})
    assert meaning in sentence and name in sentence


def test_a_healthy_iteration_is_quiet():
    healthy = {name: limit - side * 0.001 for name, (limit, side, _) in ALARMS.items()}
    assert alarms(healthy) == [] and alarms({}) == []


def test_staleness_counts_weight_updates():
    group = [Trajectory("g", 0, {}, [turn([1], weights=3), turn([1], weights=5)])]
    assert staleness(group, 5) == {"agent/staleness_mean": 1.0, "agent/staleness_max": 2.0}
    assert staleness([], 5) == {}


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create()
    for step in (1, 2, 3):
        folder.append_metrics(step, {"x": step / 2})
        (folder.rollouts / f"step_{step:06d}.parquet").write_text("")
    (folder.rollouts / "eval_000002.parquet").write_text("")
    folder.rewind(2)
    assert folder.metrics() == [{"step": 1, "x": 0.5}, {"step": 2, "x": 1.0}]
    assert sorted(p.name for p in folder.rollouts.iterdir()) == [
        "eval_000002.parquet",
        "step_000001.parquet",
        "step_000002.parquet",
    ]
    folder.rewind(0)
    assert folder.metrics() == [] and list(folder.rollouts.iterdir()) == []
