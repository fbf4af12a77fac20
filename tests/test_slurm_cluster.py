"""Jobs really submitted to an emulated two-node SLURM cluster: real srun, Ray, DeepSpeed and vLLM on one machine."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = Path(__file__).parent / "slurm" / "tiny.sh"


def load_helper():
    spec = importlib.util.spec_from_file_location("slurm_cluster", Path(__file__).parent / "slurm_cluster.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


slurm = load_helper()
pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(bool(slurm.missing()), reason=f"no emulated SLURM cluster: {slurm.missing()}"),
]
ITERATIONS = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.Cluster(tmp_path_factory.mktemp("cluster")) as running:
        running.env |= {
            "BIPACE_TEST_ROOT": str(ROOT),
            "BIPACE_PYTHON": sys.executable,
            "BIPACE_OBJECT_STORE_MB": "200",
            "PYTHONPATH": str(ROOT),
        }
        yield running


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory, rooms_tasks_file) -> Path:
    """Where the runs go; holds the tiny model and its tasks."""
    return cluster.folder


@pytest.fixture(scope="module")
def rooms_tasks_file(cluster, tiny) -> Path:
    from openrlhf_bipace import envs
    from openrlhf_bipace.lab.warmstart import write_tasks

    shutil.copytree(tiny.folder, cluster.folder / "model")
    write_tasks(cluster.folder / "train.jsonl", envs.env_class("rooms").tasks("train")[: 4 * ITERATIONS])
    cluster.env["TINY"] = str(cluster.folder)
    return cluster.folder / "train.jsonl"


def outcome(run: Path) -> str:
    """Of the run's last attempt."""
    return max((run / "slurm").glob("*/outcome"), key=os.path.getmtime).read_text().strip()


def log_of(cluster, job: str) -> str:
    return "\n".join(path.read_text()[-4000:] for path in cluster.folder.glob(f"*{job}.log"))


def tasks_by_step(run: Path) -> dict[str, list[tuple]]:
    """Step file -> its tasks, in the order of the dump."""
    from openrlhf_bipace.rollout.dump import read_rollouts

    return {
        path.name: [(row["group"], row["sample"], row["task"]) for row in read_rollouts(path) if row["turn"] == 0]
        for path in sorted((run / "rollouts").glob("step_*.parquet"))
    }


@pytest.fixture(scope="module")
def uninterrupted(cluster, folder) -> Path:
    """The run folder of a training over two nodes of one GPU each."""
    run = folder / "uninterrupted"
    job = cluster.submit("--job-name=whole", TINY, RUN_DIR=str(run))
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log_of(cluster, job)
    return run


def test_training_over_two_nodes(uninterrupted):
    assert outcome(uninterrupted) == "0 the driver ended with exit 0"
    (attempt,) = (uninterrupted / "slurm").iterdir()
    assert "Ray is complete: 2 nodes and 2 GPUs" in (attempt / "driver.log").read_text()
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, ITERATIONS + 1))
    homes = {}  # each node has one GPU, so policy and engine cannot share one
    for node in ("n1", "n2"):
        for path in (attempt / f"ray.{node}").glob("worker-*.out"):
            text = path.read_text()
            homes |= {actor: node for actor in ("PolicyActor", "RolloutActor") if f":actor_name:{actor}" in text}
    assert sorted(homes.values()) == ["n1", "n2"]
    assert (uninterrupted / "final" / "model.safetensors").exists()


def test_usr2_requeues_and_the_rest_sees_the_same_prompts(cluster, folder, uninterrupted):
    run = folder / "requeued"
    job = cluster.submit("--job-name=requeued", TINY, RUN_DIR=str(run))
    end = time.monotonic() + 400
    while not (run / "metrics.jsonl").exists():
        assert time.monotonic() < end and cluster.job(job)["JobState"] not in slurm.FINAL, log_of(cluster, job)
        time.sleep(0.2)
    for _ in range(2):
        cluster.cancel(job, "--signal=USR2", "--batch")
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log_of(cluster, job)
    first, second = sorted((run / "slurm").iterdir())
    assert (first / "outcome").read_text().startswith("75 stopped at a step boundary, requeued")
    assert (second / "outcome").read_text().startswith("0 ")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, ITERATIONS + 1))
    assert tasks_by_step(run) == tasks_by_step(uninterrupted)


def test_a_layout_larger_than_the_cluster_fails_within_its_deadline(cluster, folder):
    """C23; also: the driver's exit code is the job's and its last words are the reason."""
    run = folder / "too-large"
    job = cluster.submit(
        "--job-name=large", TINY, "--actor.num_nodes", "3", "--launch.deadline", "3", RUN_DIR=str(run)
    )
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0"), log_of(cluster, job)
    assert "the flags ask for 4 GPUs" in outcome(run) and "of 2 GPUs free" in outcome(run)


PROBE = """
import json, pathlib, ray, sys, time
ray.init()
mine, other = map(pathlib.Path, sys.argv[1:])
context = ray.get_runtime_context()
mine.write_text(json.dumps({"gpus": ray.cluster_resources()["GPU"], "address": context.gcs_address,
                            "temp": context.get_temp_dir(), "nodes": len(ray.nodes())}))
end = time.monotonic() + 200
while not other.exists():
    assert time.monotonic() < end, "the other job never got ready"
    time.sleep(0.2)
"""


def test_two_jobs_on_one_node_at_once(cluster, folder):
    """C22: each waits for the other while both run; neither sees the other's Ray."""
    (folder / "probe.py").write_text(PROBE)
    script = folder / "probe.sh"
    script.write_text(
        "#!/usr/bin/env bash\nset -euo pipefail\nsource $BIPACE_TEST_ROOT/slurm/lib/ray_cluster.sh\nbipace_setup\n"
        'bipace_run "$BIPACE_PYTHON" probe.py "$1" "$2"\n'
    )
    options = ("--nodelist=n1", "--nodes=1", "--gpus-per-node=1", "--cpus-per-task=2", "--output=probe-%j.log")
    files = [folder / "probe1.json", folder / "probe2.json"]
    jobs = [
        cluster.submit(*options, script, mine, other, RUN_DIR=str(folder / f"probe{i}"))
        for i, (mine, other) in enumerate([files, files[::-1]])
    ]
    for job in jobs:
        ended = cluster.wait(job)
        assert (ended["JobState"], ended["NodeList"]) == ("COMPLETED", "n1"), log_of(cluster, job)
    first, second = (json.loads(path.read_text()) for path in files)
    assert first["gpus"] == second["gpus"] == 1 and first["nodes"] == second["nodes"] == 1
    assert first["address"] != second["address"] and first["temp"] != second["temp"]
    assert not Path(first["temp"]).exists() and not Path(second["temp"]).exists()


def test_a_worker_that_dies_ends_the_job(cluster, folder):
    import psutil

    run = folder / "killed"
    script = folder / "sleep.sh"
    script.write_text(
        "#!/usr/bin/env bash\nset -euo pipefail\nsource $BIPACE_TEST_ROOT/slurm/lib/ray_cluster.sh\nbipace_setup\n"
        "bipace_run sleep 300\n"
    )
    options = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2", "--output=sleep-%j.log")
    job = cluster.submit(*options, script, RUN_DIR=str(run))
    end = time.monotonic() + 200
    while not list((run / "slurm").glob("*/ready")):
        assert time.monotonic() < end, log_of(cluster, job)
        time.sleep(0.2)
    temporary = f"/tmp/bp{job}.0.w0/"
    (raylet,) = [
        p
        for p in psutil.process_iter(["name", "cmdline"])
        if p.info["name"] == "raylet" and temporary in " ".join(p.info["cmdline"] or [])  # None: a zombie
    ]
    raylet.kill()
    ended = cluster.wait(job, 120)
    assert ended["ExitCode"] == "69:0", log_of(cluster, job)
    assert "the workers step ended" in outcome(run) and "n2: Ray ended" in outcome(run)


def test_a_scaling_study_of_one_and_two_nodes(cluster, folder):
    study = folder / "scaling"
    words = [
        "scaling", "--script", TINY, "--out", study, "--nodes", "1", "2", "--batch_sizes", "4", "--samples", "4",
        "--updates", "1", "--iterations", "4", "--warmup", "1",
    ]  # fmt: skip

    def run_study() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "openrlhf_bipace.cli.study", *map(str, words)],
            env=cluster.env | {"SBATCH_GPUS_PER_NODE": "2"},
            cwd=folder,
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "2 missing; 2 submitted now" in run_study()
    jobs = json.loads((study / "jobs.json").read_text())
    report = str(max(map(int, jobs.values())) + 1)
    ended = cluster.wait(report, 800)
    assert ended["JobState"] == "COMPLETED", (study / "jobs" / "report.log").read_text()
    with (study / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["nodes"], row["state"], row["iterations"]) for row in rows] == [
        ("1", "finished", "3"),
        ("2", "finished", "3"),
    ]
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)
    assert float(rows[0]["strong_efficiency"]) == 1
    measured = float(rows[1]["tokens_per_s"]) / 2 / float(rows[0]["tokens_per_s"])
    assert float(rows[1]["strong_efficiency"]) == pytest.approx(measured)
    assert (study / "scaling.png").stat().st_size > 10_000 and "| 2 | 4 | bipace_q | finished" in (
        study / "report.md"
    ).read_text()
    assert "2 finished; 0 submitted now" in run_study()
