"""--bipace.epsilon auto: the leave-one-out R^2, the scan and the refusal."""

from __future__ import annotations

import json
import math
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages import StepBatch, calibrate, leave_one_out_r2
from openrlhf_bipace.advantages.calibration import GRID
from openrlhf_bipace.advantages.pipeline import CreditPipeline
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.records import StepRecord, Trajectory

R = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("reference.py"))))
AUTO = BipaceConfig(epsilon="auto")


def batch(ret: list[float], trajectory: list[int], group: list | None = None) -> StepBatch:
    n = len(ret)
    turn = [trajectory[:i].count(t) for i, t in enumerate(trajectory)]
    same = ["x"] * n
    return StepBatch(group or same, trajectory, turn, ret, ret, same, same)


def healthy(states: int = 6, trajectories: int = 8, noise: float = 0.02, collapsed: bool = False, groups: int = 4):
    """Hidden states that tell the state, returns that depend on the state alone (or vectors that tell nothing)."""
    gen = torch.Generator().manual_seed(0)
    centres = torch.eye(states, 16)
    row = torch.arange(groups * trajectories * states)
    state = row % states
    phi = centres[0].expand(len(row), -1) if collapsed else centres[state]
    phi = phi + noise * torch.randn(len(row), 16, generator=gen)
    ret = state.double() / states + 0.1 * torch.randn(len(row), generator=gen, dtype=torch.float64)
    group, sample = row // (trajectories * states), row // states % trajectories
    return phi, StepBatch(group, sample, state, ret, ret, state, state)


def test_r2_by_hand():
    # Two trajectories, two clusters: (0, 10) in each. Without clusters a return of trajectory 0 is predicted by the
    # mean 5 of trajectory 1, so each of four errors is 25; with them by (mate + 5) / 2, so each error is 2.5^2.
    steps = batch([0.0, 10.0, 0.0, 10.0], [0, 0, 1, 1])
    assert leave_one_out_r2(torch.tensor([0, 1, 0, 1]), steps) == pytest.approx(1 - 6.25 / 25)
    assert leave_one_out_r2(torch.tensor([0, 1, 1, 0]), steps) == pytest.approx(1 - 7.5**2 / 25)
    assert leave_one_out_r2(torch.tensor([0, 1, 2, 3]), steps) == 0  # no mates, nothing gained or lost


def test_mates_of_the_same_trajectory_do_not_count():
    steps = batch([0.0, 0.0, 10.0, 10.0], [0, 0, 1, 1])
    assert leave_one_out_r2(torch.tensor([0, 0, 1, 1]), steps) == 0


def test_clusters_of_different_groups_are_different_clusters():
    steps = batch([0.0, 10.0] * 4, [0, 0, 1, 1] * 2, ["a"] * 4 + ["b"] * 4)
    assert leave_one_out_r2(torch.tensor([0, 1] * 4), steps) == pytest.approx(0.75)


@pytest.mark.parametrize("seed", range(6))
def test_r2_against_plain_loops(seed):
    rows = R.random_rows(random.Random(seed), groups=4)
    steps = StepBatch(**R.columns(rows))
    assert leave_one_out_r2(steps.cluster, steps) == pytest.approx(R.r2(rows), abs=1e-9)


def test_r2_ignores_a_constant_and_the_scale():
    rows = R.random_rows(random.Random(0))
    plain = StepBatch(**R.columns(rows))
    moved = StepBatch(**R.columns([{**row, "ret": 1e6 + 1e-3 * row["ret"]} for row in rows]))
    assert leave_one_out_r2(moved.cluster, moved) == pytest.approx(leave_one_out_r2(plain.cluster, plain), abs=1e-5)


def test_r2_where_there_is_nothing_to_predict():
    assert leave_one_out_r2(torch.tensor([0, 0]), batch([0.1, 0.1], [0, 1])) == 0
    assert leave_one_out_r2(torch.tensor([0, 0]), batch([0.0, 1.0], [0, 0])) == 0  # one trajectory: no others
    assert leave_one_out_r2(torch.tensor([], dtype=torch.int64), batch([], [])) == 0


def test_a_geometry_that_carries_the_state_is_found():
    phi, steps = healthy()
    found = calibrate(phi, steps, AUTO)
    assert not found.refused and found.warning() == "" and found.r2 > 0.5
    assert len(found.clusters.sizes) == 4 * 6  # one cluster per state and group
    assert found.giant_share == pytest.approx(1 / 6)
    assert [e for e, _ in found.curve] == sorted(e for e, _ in found.curve)
    assert max(r2 for _, r2 in found.curve) == found.r2
    assert found.epsilon == next(e for e, r2 in found.curve if r2 == found.r2)  # the smallest of equals
    logged = found.diagnostics()
    assert logged["bipace/epsilon"] == found.epsilon and logged["bipace/r2"] == found.r2
    assert logged["bipace/r2_refused"] == 0 and logged["bipace/giant_share"] == found.giant_share


def test_a_collapsed_geometry_is_refused():
    phi, steps = healthy(collapsed=True)
    found = calibrate(phi, steps, AUTO)
    assert found.refused and found.r2 < AUTO.min_r2
    assert "the best leave-one-out R^2 is" in found.warning() and "--bipace.min_r2" in found.warning()
    assert found.diagnostics()["bipace/r2_refused"] == 1
    steps.cluster = found.clusters.labels
    fallback = advantages.state_only("bipace_q")
    assert fallback == "bigpo" and torch.isfinite(advantages.estimate(fallback, steps, AUTO).total).all()


def test_the_threshold_decides():
    phi, steps = healthy()
    r2 = calibrate(phi, steps, AUTO).r2
    assert not calibrate(phi, steps, BipaceConfig(epsilon="auto", min_r2=r2)).refused
    assert calibrate(phi, steps, BipaceConfig(epsilon="auto", min_r2=r2 + 1e-9)).refused


def test_the_labels_are_those_of_the_chosen_epsilon():
    from openrlhf_bipace.clustering import cluster

    phi, steps = healthy(noise=0.3)
    for options in ({"centroid": "seed"}, {"order": "trajectory"}):
        config = BipaceConfig(epsilon="auto", **options)
        found = calibrate(phi, steps, config, grid=[0.3, 0.1, 0.5])
        again = cluster(phi, steps.group, found.epsilon, centroid=config.centroid, order=steps.order(config.order))
        assert [e for e, _ in found.curve] == [0.1, 0.3, 0.5]
        assert torch.equal(found.clusters.labels, again.labels)


def test_bad_input():
    phi, steps = healthy()
    with pytest.raises(ValueError, match="grid: got no epsilon to try"):
        calibrate(phi, steps, AUTO, grid=[])
    phi[7] = math.nan
    with pytest.raises(ValueError, match="phi: NaN vector at group 0, trajectory 1, turn 1"):
        calibrate(phi, steps, AUTO)
    empty = calibrate(torch.zeros(0, 4), batch([], []), AUTO)
    assert empty.refused and empty.giant_share == 0


# Pooled over iterations ------------------------------------------------------------------------------------------


def test_the_second_scan_starts_from_the_first_by_hand():
    """Clusters by state, R^2 0.75 (as above); then the same vectors with the returns crossed, R^2 1 - 56.25 / 25."""
    phi = torch.eye(2)[[0, 1, 0, 1]]
    first = calibrate(phi, batch([0.0, 10.0, 0.0, 10.0], [0, 0, 1, 1]), AUTO, grid=[0.1])
    assert (first.evidence.trajectories, first.evidence.base, first.evidence.errors) == (2, 100, [25])
    second = calibrate(phi, batch([0.0, 10.0, 10.0, 0.0], [0, 0, 1, 1]), AUTO, grid=[0.1], before=first.evidence)
    assert second.evidence.trajectories == pytest.approx(0.9 * 2 + 2)
    assert second.evidence.base == pytest.approx(0.9 * 100 + 100)
    assert second.evidence.errors == pytest.approx([0.9 * 25 + 225])
    assert second.r2 == pytest.approx(1 - 247.5 / 190) and second.curve == [(0.1, second.r2)] and second.refused
    assert first.evidence.errors == [25]  # untouched


def test_a_choice_settles_after_enough_trajectories():
    phi, steps = healthy()  # 32 trajectories: 32, 60.8, 86.7, 110.0, 131.0
    found, counts = None, []
    for _ in range(5):
        found = calibrate(phi, steps, AUTO, before=found.evidence if found else None)
        counts.append(found.settled)
    assert counts == [False] * 4 + [True]
    phi, steps = healthy(collapsed=True)
    found = None
    for _ in range(6):
        found = calibrate(phi, steps, AUTO, before=found.evidence if found else None)
    assert found.refused and not found.settled and found.evidence.trajectories > 120


def tells_nothing(seed: int) -> tuple[torch.Tensor, StepBatch]:
    """4 groups of 8 trajectories of 3 turns that succeed by luck; vectors without meaning."""
    gen, row = torch.Generator().manual_seed(seed), torch.arange(96)
    ret = (torch.rand(32, generator=gen) < 0.3).double()[row // 3] * 0.95 ** (2 - row % 3)
    return torch.randn(96, 6, generator=gen), StepBatch(row // 24, row // 3 % 8, row % 3, ret, ret, row % 3, row % 3)


def test_a_geometry_that_tells_nothing_is_not_kept():
    """Ten runs of eight iterations: asked one by one, most of them once say yes to noise; pooled, none keeps it."""
    once = kept = 0
    for run in range(10):
        found, yes = None, False
        for i in range(8):
            phi, steps = tells_nothing(100 * run + i)
            yes |= not calibrate(phi, steps, AUTO, grid=[0.05, 0.1, 0.2, 0.4]).refused
            found = calibrate(phi, steps, AUTO, grid=[0.05, 0.1, 0.2, 0.4], before=found.evidence if found else None)
            kept += found.settled
        once += yes
    assert once >= 7 and kept == 0


def test_evidence_of_another_grid_is_refused():
    phi, steps = healthy()
    before = calibrate(phi, steps, AUTO, grid=[0.1, 0.2]).evidence
    message = f"grid: got {len(GRID)} epsilons, expected the 2 of the iterations before"
    with pytest.raises(ValueError, match=message):
        calibrate(phi, steps, AUTO, before=before)


def rollouts(seed: int, groups: int = 4) -> tuple[list[Trajectory], torch.Tensor]:
    """8 rollouts per group whose vectors tell the room and whose rewards come from it, with noise."""
    gen, out, phi = torch.Generator().manual_seed(seed), [], []
    for g in range(groups):
        for sample in range(8):
            steps = []
            for turn in range(3):
                reward = turn + float(torch.randn(1, generator=gen))
                steps.append(StepRecord(turn, "", [1], [2], turn == 0, "", "go", True, reward, "stop"))
                phi.append(torch.eye(8)[turn] + 0.05 * torch.randn(8, generator=gen))
            out.append(Trajectory(f"g{g}", sample, {}, steps))
    return out, torch.stack(phi)


def test_a_restored_pipeline_goes_on_as_if_never_stopped():
    """Stopped after every iteration, through JSON, as a checkpoint would; the fifth settles."""
    config = BipaceConfig(epsilon="auto", gamma=0.0)
    whole, stopped = CreditPipeline("bipace_q", config), CreditPipeline("bipace_q", config)
    settled = []
    for i in range(7):
        trajectories, phi = rollouts(i)
        one, other = whole.run(trajectories, phi), stopped.run(trajectories, phi)
        assert torch.equal(one.values, other.values) and one.metrics["bipace/r2"] == other.metrics["bipace/r2"]
        settled.append(whole.epsilon is not None)
        state = json.loads(json.dumps(stopped.state()))
        stopped = CreditPipeline("bipace_q", config)
        stopped.restore(state)
    assert settled == [False] * 4 + [True] * 3 and one.calibration is None
    assert whole.state() == stopped.state()


def test_a_fixed_epsilon_is_not_replaced_by_a_checkpoint_s():
    pipeline = CreditPipeline("bipace_q", BipaceConfig(epsilon=0.2))
    pipeline.restore({"epsilon": 0.05, "evidence": None})
    assert pipeline.epsilon == 0.2
