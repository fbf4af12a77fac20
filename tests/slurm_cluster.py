"""A two-node SLURM cluster on this machine: private munged, slurmctld and one slurmd per node.

Every daemon has its own ports and files under one folder and is ended by its process id. It needs Debian's slurm-wlm
and munge, and root (the declared GPUs are copies of /dev/null). What it cannot show: NCCL, InfiniBand, containers,
cgroups, preemption between partitions.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
SBIN = "/usr/sbin"
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

CONF = """\
ClusterName=emulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5,batch_sched_delay=1
SlurmdParameters=config_overrides
GresTypes=gpu
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=30
KillWait=10
MinJobAge=3600
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why this machine cannot emulate a cluster; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "root is needed to create the emulated GPUs' device files"


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    """Context manager: a running cluster of `nodes` nodes with `gpus` declared GPUs each."""

    def __init__(self, folder: Path, nodes: int = 2, gpus: int = 2, cpus: int = 8) -> None:
        self.folder = folder
        self.names = [f"n{i + 1}" for i in range(nodes)]
        self._gpus, self._cpus = gpus, cpus
        self._daemons: list[tuple[str, subprocess.Popen]] = []
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{SBIN}"}

    def __enter__(self) -> Cluster:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a test run that is ended still cleans up
        try:
            self._configure()
            self._munge()
            self._daemon("slurmctld", "-D", "-f", self.env["SLURM_CONF"])
            for name in self.names:
                self._daemon("slurmd", "-D", "-N", name, "-f", self.env["SLURM_CONF"])
            self._await(lambda: self._idle() == len(self.names), "every node idle", 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if any(name == "slurmctld" and daemon.poll() is None for name, daemon in self._daemons):
            self._command("scancel", "--user=root", check=False)
            with contextlib.suppress(TimeoutError):
                self._await(lambda: not self._command("squeue", "--noheader"), "an empty queue", 60)
        for _, daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for _, daemon in reversed(self._daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def submit(self, *words: str | Path, **env: str) -> str:
        """``sbatch`` these words in the cluster's folder; the job's id."""
        return self._command("sbatch", "--parsable", *map(str, words), env=env).split(";")[0]

    def scontrol(self, *words: str) -> str:
        """Output of ``scontrol``."""
        return self._command("scontrol", *words)

    def cancel(self, job: str, *options: str) -> None:
        """``scancel`` one job."""
        self._command("scancel", *options, job)

    def job(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says, as a dictionary: JobState, ExitCode, Restarts, NodeList, ..."""
        words = self.scontrol("show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, seconds: float = 600) -> dict[str, str]:
        """The job once it has ended. Raises TimeoutError."""
        self._await(lambda: self.job(job)["JobState"] in FINAL, f"the end of job {job}", seconds)
        return self.job(job)

    def wait_running(self, job: str, seconds: float = 60) -> None:
        """Until the job runs or has ended."""
        states = FINAL | {"RUNNING"}
        self._await(lambda: self.job(job)["JobState"] in states, f"the start of job {job}", seconds)

    def _configure(self) -> None:
        folder, (ctld, *ports) = self.folder, free_ports(1 + len(self.names))
        (folder / "state").mkdir(parents=True)
        host = socket.gethostname().split(".")[0]
        nodes, gres = [], []
        for name, port in zip(self.names, ports, strict=True):
            (folder / f"spool-{name}").mkdir()
            nodes.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} "
                f"RealMemory=64000 Gres=gpu:{self._gpus} State=UNKNOWN"
            )
            for gpu in range(self._gpus):
                device = folder / f"{name}-gpu{gpu}"
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))  # a clone of /dev/null
                gres.append(f"NodeName={name} Name=gpu File={device}")
        conf = CONF.format(host=host, ctld=ctld, folder=folder, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(conf)
        (folder / "gres.conf").write_text("\n".join(gres) + "\n")

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._await(lambda: (self.folder / "munge.sock").exists(), "munged's socket", 20)

    def _daemon(self, program: str, *words: str) -> None:
        log = (self.folder / f"{program}.out").open("a")
        daemon = subprocess.Popen(  # in a session of its own: they outlive whoever ends the tests, until __exit__
            [program, *words], env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._daemons.append((program, daemon))

    def _command(self, *words: str, check: bool = True, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            words, env={**self.env, **(env or {})}, cwd=self.folder, text=True, capture_output=True, timeout=60
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def _idle(self) -> int:
        try:
            return len(self._command("sinfo", "--noheader", "--Node", "--states=idle").splitlines())
        except RuntimeError:  # slurmctld does not answer yet
            return 0

    def _await(self, condition, what: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            for name, daemon in self._daemons:
                if daemon.poll() is not None:
                    raise RuntimeError(f"{name} ended with {daemon.returncode}; see {self.folder}")
            if time.monotonic() > end:
                raise TimeoutError(f"{what} was not seen within {seconds:.0f} s; see {self.folder}")
            time.sleep(0.3)
