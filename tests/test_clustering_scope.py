"""--bipace.scope, hidden states that are elsewhere, the study and the GPU benchmark."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

import pytest
import torch

from openrlhf_bipace import advantages
from openrlhf_bipace.advantages import StepBatch, calibrate, leave_one_out_r2
from openrlhf_bipace.advantages.calibration import GRID
from openrlhf_bipace.advantages.pipeline import CreditPipeline
from openrlhf_bipace.clustering import backends, cluster
from openrlhf_bipace.config import BipaceConfig
from openrlhf_bipace.records import StepRecord, Trajectory

ROOT = Path(__file__).parent.parent


def two_groups(**more) -> StepBatch:
    """Groups a and b, two rollouts of one turn each, all four turns alike but for their returns 0, 2, 4, 10."""
    ret = [0.0, 2.0, 4.0, 10.0]
    return StepBatch(["a", "a", "b", "b"], [0, 1, 0, 1], [0] * 4, ret, ret, ["x"] * 4, ["same"] * 4, **more)


@pytest.mark.parametrize("name", ["gigpo", "bigpo", "one_v", "state_v", "ngram_v"])
def test_equal_turns_of_two_groups_share_a_part_only_if_the_scope_says_so(name):
    """C5, for every partition."""
    phi = torch.ones(4, 3)
    for scope, expected in (("group", [-1, 1, -3, 3]), ("batch", [-4, -2, 0, 6])):
        config = BipaceConfig(scope=scope)
        steps = two_groups(state_key=["s"] * 4, observation_text=["one room"] * 4)
        steps.cluster = cluster(phi, steps.within(scope)[0], 0.1).labels
        found = advantages.estimate(name, steps, config)
        assert found.step.tolist() == pytest.approx(expected)
        assert found.episode.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2, abs=1e-5)  # never across groups
        assert found.diagnostics["bipace/clusters"] == (2 if scope == "group" else 1)
        assert found.diagnostics.get("bipace/giant_share", 1) == 1


def test_the_share_of_a_cluster_is_of_what_it_may_fill():
    steps = two_groups()
    steps.cluster = torch.tensor([0, 1, 0, 0])
    batch = advantages.estimate("bigpo", steps, BipaceConfig(scope="batch")).diagnostics
    assert batch["bipace/giant_share"] == 0.75


def test_hgpo_follows_the_scope():
    values = advantages.estimate("hgpo", two_groups(), BipaceConfig(scope="batch")).step
    assert values.tolist() == pytest.approx([-4, -2, 0, 6])


def test_r2_and_calibration_across_groups():
    """Mates of the other group predict; without them nobody has one."""
    steps = StepBatch(["a", "a", "b", "b"], [0, 1, 0, 1], [0] * 4, [0.0, 1, 0, 1], [0] * 4, ["x"] * 4, ["o"] * 4)
    labels = torch.tensor([0, 1, 0, 1])
    assert leave_one_out_r2(labels, steps) == 0
    # the guess of a 0 is (0 + 1) / 2 for its mate 0 and its group's other return 1
    assert leave_one_out_r2(labels, steps, "batch") == pytest.approx(0.75)
    found = calibrate(torch.eye(2)[labels], steps, BipaceConfig(epsilon="auto", scope="batch"))
    assert found.r2 == pytest.approx(0.75) and len(found.clusters.sizes) == 2 and found.giant_share == 0.5


class Elsewhere:
    """Vectors that the pipeline cannot see: it may ask for their number and their clusters."""

    def __init__(self, phi: torch.Tensor) -> None:
        self.phi, self.asked = phi, []

    def __len__(self) -> int:
        return len(self.phi)

    def cluster(self, group_ids, epsilon, **options):
        self.asked.append(epsilon)
        return cluster(self.phi, group_ids, epsilon, **options)


def rollouts() -> tuple[list[Trajectory], torch.Tensor]:
    gen, out, phi = torch.Generator().manual_seed(0), [], []
    for group in range(2):
        for sample in range(4):
            steps = []
            for turn in range(3):
                good = float(torch.rand(1, generator=gen) < 0.5)
                text = f"room {turn}"
                steps.append(StepRecord(turn, text, [1], [2], turn == 0, "", "go", True, turn + good, "stop"))
                phi.append(torch.eye(8)[turn] + 0.05 * torch.randn(8, generator=gen))
            out.append(Trajectory(f"g{group}", sample, {}, steps))
    return out, torch.stack(phi)


@pytest.mark.parametrize("epsilon", [0.1, "auto"])
def test_vectors_may_stay_elsewhere(epsilon):
    """Calibration included: only labels come back."""
    trajectories, phi = rollouts()
    config, elsewhere = BipaceConfig(epsilon=epsilon, gamma=0.0), Elsewhere(phi)
    near, far = (CreditPipeline("bipace_q", config).run(trajectories, given) for given in (phi, elsewhere))
    assert torch.equal(near.values, far.values) and near.columns == far.columns
    assert len(elsewhere.asked) == (1 if epsilon == 0.1 else len(GRID))
    assert far.clustering["backend"] == "reference" and far.clustering["records"] == 24


def test_flags():
    choices = next(f for f in BipaceConfig.__dataclass_fields__.values() if f.name == "cluster_backend").metadata
    assert choices["choices"] == backends()
    for bad, message in (
        ({"cluster_backend": "faiss-ivf"}, "--bipace.cluster_backend: got 'faiss-ivf', allowed: .*centroid seed"),
        ({"cluster_workers": -1}, "--bipace.cluster_workers: got -1"),
        ({"cluster_gpus": -0.5}, "--bipace.cluster_gpus: got -0.5"),
        ({"scope": "world"}, "--bipace.scope: got 'world', allowed: group | batch"),
        ({"dump_hidden": True, "cluster_workers": 1}, "--bipace.dump_hidden: .*cluster_workers"),
    ):
        with pytest.raises(ValueError, match=message):
            BipaceConfig(**bad)
    assert BipaceConfig(cluster_backend="faiss-ivf", centroid="seed").cluster_backend == "faiss-ivf"


def test_the_study_plays_through_a_hundred_million_steps(tmp_path, monkeypatch):
    from openrlhf_bipace.cli import study
    from openrlhf_bipace.lab import clustering_study

    rates = clustering_study.Rates(per_row=2e-5, per_pair=1e-7, per_step=1e-6, copy=4e9)
    monkeypatch.setattr(clustering_study, "measure", lambda d, centroid: rates)
    study.main(["clustering", "--prompts", "10", "333000", "--nodes", "1", "64", "--out", str(tmp_path / "s.csv")])
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert len(rows) == 4 and 0.95e8 < int(rows[-1]["steps"]) < 1.05e8
    assert float(rows[3]["cluster"]) < float(rows[2]["cluster"]) / 60  # 64 times the workers
    assert float(rows[3]["advantages"]) == float(rows[2]["advantages"]) == int(rows[2]["steps"]) * 1e-6
    with pytest.raises(SystemExit):
        study.main(["clustering", "--prompts", "900000"])


def test_the_study_measures_plausible_rates():
    from openrlhf_bipace.lab.clustering_study import deal, measure

    rates = measure(32, "mean", seconds=0.1)
    assert 0 < rates.per_row + 400 * rates.per_pair < 1e-2 and 0 < rates.per_step < 1e-3 and rates.copy > 1e7
    assert deal(torch.tensor([5.0, 4, 3, 2]).numpy(), 2).tolist() == [7, 7]


def test_the_gpu_benchmark_runs_at_tiny_size(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    main = runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))["main"]
    found = main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "gpu.json")])
    assert found["tiny"]["turns"] == 96 and found["tiny"]["seconds per micro-batch"]["hook"] > 0
    assert (tmp_path / "gpu.json").exists()
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            main([])
