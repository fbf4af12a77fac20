"""One environment behind a blocking `request`, in this process or in one of its own. `pool.py` runs many of them.

``python -m openrlhf_bipace.envs.worker FD`` is the other end of `ProcessWorker`: a fresh interpreter that imports the
environment and nothing of the parent's.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing.connection import Connection, Pipe
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.envs.base import checked

CLOSE_SECONDS = 5.0  # how long a worker may take to close before it is killed
_MESSAGE = 2000  # characters of an environment's exception that are passed on
_GIB = 1 << 30


class WorkerError(Exception):
    """The environment raised, answered against its contract, or its process died."""


def perform(env: envs.TextEnv, method: str, argument: Any) -> Any:
    """Answer one request: ``describe``, ``reset`` (a task) or ``step`` (a command). WorkerError tells what failed."""
    if method == "describe":
        return {"instructions": env.instructions, "max_turns": env.max_turns}
    try:
        answer = getattr(env, method)(argument)
    except BaseException as error:  # SystemExit too: an environment that exits is a failed one
        raise WorkerError(explain(error)) from error
    try:
        return checked(method, answer)
    except (TypeError, ValueError) as error:
        raise WorkerError(str(error)) from error


def explain(error: BaseException) -> str:
    """`error` in a line: its type, its message and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    message = str(error)
    if len(message) > _MESSAGE:
        message = f"{message[:_MESSAGE]}... ({len(message):,} characters)"
    return f"{type(error).__name__}: {message}{place}"


class ThreadWorker:
    """An environment in this process. A call that never returns cannot be ended, only left behind."""

    pid = None

    def __init__(self, name: str, options: dict[str, Any], memory_gib: float = 0.0) -> None:
        self._make = lambda: envs.make(name, **options)
        self._env: envs.TextEnv | None = None

    def request(self, method: str, argument: Any = None) -> Any:
        """See `perform`; the environment is made by the first request."""
        if self._env is None:
            try:
                self._env = self._make()
            except BaseException as error:
                raise WorkerError(explain(error)) from error
        return perform(self._env, method, argument)

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()

    def kill(self) -> None:
        """Nothing can be done about a running call."""

    def too_large(self) -> bool:
        """Memory is this process's own affair."""
        return False


class ProcessWorker:
    """An environment in a process of its own, which ends when this one does.

    Args:
        name: the environment. options: of its constructor.
        memory_gib: resident memory above which `too_large` holds; at twice that allocations fail. 0: no limit.
    """

    def __init__(self, name: str, options: dict[str, Any], memory_gib: float = 0.0) -> None:
        self._limit = int(memory_gib * _GIB)
        self._connection, far = Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        variables = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        # Not multiprocessing's spawn: that would import the parent's __main__, in Ray a large one.
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(far.fileno())],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an environment prints is no result
            env=variables,
            process_group=0,  # what the environment starts dies with it
        )
        far.close()
        self.pid = self._process.pid
        self._connection.send((name, options, 2 * self._limit))
        self._started = False

    def request(self, method: str, argument: Any = None) -> Any:
        """See `perform`. The first answer waits until the process has made its environment."""
        try:
            self._connection.send((method, argument))
            if not self._started:
                self._receive()
                self._started = True
            return self._receive()
        except (EOFError, OSError):
            raise WorkerError(f"worker process {self.pid} {_fate(self._process.wait())}") from None

    def _receive(self) -> Any:
        answer, error = self._connection.recv()
        if error is not None:
            raise WorkerError(error)
        return answer

    def close(self) -> None:
        """Close the environment and end the process, by force if it takes too long."""
        try:
            self._connection.send(("close", None))
            self._process.wait(CLOSE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()
            self._process.wait()
        self._connection.close()

    def kill(self) -> None:
        """End the process and what it started, at once. A request under way raises WorkerError."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def too_large(self) -> bool:
        """Has its memory outgrown the limit?"""
        return 0 < self._limit < resident_bytes(self.pid)


def resident_bytes(pid: int) -> int:
    """Resident memory of process `pid`; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _fate(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _listen(connection: Connection, requests: queue.SimpleQueue) -> None:
    """Pass requests on. The end of the connection is the end of the parent, also in the middle of a step."""
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _serve(connection: Connection) -> None:
    name, options, data_limit = connection.recv()
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests), daemon=True).start()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if data_limit and (hard == resource.RLIM_INFINITY or data_limit < hard):
        resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
    try:
        env = envs.make(name, **options)
        connection.send((None, None))
    except BaseException as error:
        connection.send((None, explain(error)))
        return
    answer: tuple[Any, str | None]
    while True:
        method, argument = requests.get()
        if method == "close":
            env.close()
            return
        try:
            answer = perform(env, method, argument), None
        except WorkerError as error:
            answer = None, str(error)
        connection.send(answer)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
