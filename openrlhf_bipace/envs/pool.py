"""A warm pool of environments behind an async interface: time limits, restarts, one failure costs one episode.

A worker holds one environment and plays one episode at a time: a thread where the environment says that it is
`thread_safe`, else a process (`worker.py`). Workers are started as episodes ask for them and kept for the next ones.
One that hangs, dies or raises is replaced and its episode fails alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from openrlhf_bipace import envs
from openrlhf_bipace.envs.worker import ProcessWorker, ThreadWorker, WorkerError
from openrlhf_bipace.records import EndReason

MAX_THREADS = 1024
PROCESSES_PER_CORE = 8  # an environment waits for the policy most of the time

logger = logging.getLogger(__name__)


class EnvFailure(Exception):
    """The environment raised, died or did not answer in time; carries the end reason."""

    def __init__(self, reason: EndReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Episode:
    """One environment for the length of an episode. `max_turns` and `instructions` are known after `reset`."""

    max_turns: int
    instructions: str

    def __init__(self, slot: _Slot, step_timeout: float, reset_timeout: float) -> None:
        self._slot, self._limits = slot, {"step": step_timeout, "reset": reset_timeout}

    async def reset(self, task: dict[str, Any]) -> envs.Observation:
        """Start the episode of `task`. EnvFailure when the environment does not."""
        if self._slot.description is None:
            self._slot.description = await self._call("describe", None)
        self.max_turns = self._slot.description["max_turns"]
        self.instructions = self._slot.description["instructions"]
        return await self._call("reset", task)

    async def step(self, text: str) -> envs.StepResult:
        """Carry out one command. EnvFailure when the environment does not."""
        return await self._call("step", text)

    async def _call(self, method: str, argument: Any) -> Any:
        phase = "step" if method == "step" else "reset"
        limit = self._limits[phase]
        try:
            return await self._slot.request(method, argument, limit)
        except TimeoutError:
            raise EnvFailure(EndReason.ENV_TIMEOUT, f"{phase} took over {limit} s") from None
        except WorkerError as error:
            raise EnvFailure(EndReason.ENV_ERROR, str(error)) from error


class EnvPool:
    """Environments of one kind, each in a worker of its own.

    Args:
        name: the environment, registered or ``path/to/file.py:ClassName``.
        options: of its constructor.
        workers: episodes at once; further ones wait for a free worker. 0: 1024 threads or 8 processes per core.
        step_timeout, reset_timeout: seconds; the first reset of a worker includes its start.
        recycle: episodes after which a worker is replaced (0: never).
        memory_gib: resident memory of a worker process after which it is replaced, at the end of its episode; at twice
            that the episode fails. 0: no limit.
        processes: whether workers are processes; by default unless the environment is `thread_safe`.

    `counts` says what happened: episodes, started (workers), recycled, failed (workers replaced after a failure).
    Not for use from several threads. Workers end with the pool, with `close` and with this process.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any] | None = None,
        *,
        workers: int = 0,
        step_timeout: float = 60.0,
        reset_timeout: float = 300.0,
        recycle: int = 500,
        memory_gib: float = 4.0,
        processes: bool | None = None,
    ) -> None:
        if processes is None:
            processes = not envs.env_class(name).thread_safe
        kind = ProcessWorker if processes else ThreadWorker
        self.capacity = workers or (PROCESSES_PER_CORE * len(os.sched_getaffinity(0)) if processes else MAX_THREADS)
        self.counts: Counter[str] = Counter()
        self._limits = (step_timeout, reset_timeout)
        self._recycle = recycle
        self._make: Callable[[], Any] = lambda: kind(name, options or {}, memory_gib)
        self._slots: set[_Slot] = set()
        self._idle: list[_Slot] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._finalizer = weakref.finalize(self, _end, self._slots)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        """An environment, from now to the end of the block."""
        slot = await self._acquire()
        try:
            yield Episode(slot, *self._limits)
        finally:
            self._release(slot)

    def pids(self) -> list[int]:
        """Process ids of the workers that are processes."""
        return [slot.worker.pid for slot in self._slots if slot.worker.pid is not None]

    def close(self) -> None:
        """End every worker; one in the middle of a call is not waited for."""
        self._finalizer()
        self._idle.clear()

    async def _acquire(self) -> _Slot:
        while not self._idle and len(self._slots) >= self.capacity:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()  # pass on what this one may have been woken for
                raise
        self.counts["episodes"] += 1
        return self._idle.pop() if self._idle else self._start()

    def _release(self, slot: _Slot) -> None:
        if not self._finalizer.alive:
            return
        slot.episodes += 1
        worn = (self._recycle and slot.episodes >= self._recycle) or slot.worker.too_large()
        if slot.failed or worn:
            self.counts["failed" if slot.failed else "recycled"] += 1
            self._slots.discard(slot)
            slot.end()
            slot = self._start()
        self._idle.append(slot)
        self._wake()

    def _start(self) -> _Slot:
        self.counts["started"] += 1
        slot = _Slot(self._make())
        self._slots.add(slot)
        return slot

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class _Slot:
    """A worker and the thread that waits for its answers."""

    def __init__(self, worker: ThreadWorker | ProcessWorker) -> None:
        self.worker = worker
        self.description: dict[str, Any] | None = None
        self.episodes = 0
        self._failed = False
        self._last: Future | None = None
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        # Daemonic: an environment that hangs in a thread must not keep the interpreter from ending.
        threading.Thread(target=_work, args=(self._jobs,), name="env", daemon=True).start()

    @property
    def failed(self) -> bool:
        """It raised or died, or its last call was given up before the answer."""
        return self._failed or (self._last is not None and not self._last.done())

    async def request(self, method: str, argument: Any, limit: float) -> Any:
        """The worker's answer. TimeoutError after `limit` seconds, WorkerError as the worker raises it."""
        self._last = future = Future[Any]()
        future.set_running_or_notify_cancel()  # giving up waiting does not end the call
        self._jobs.put((future, self.worker.request, method, argument))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limit)
        except Exception:
            self._failed = True
            raise

    def end(self) -> None:
        """End the worker: by force where a call is under way, else after closing the environment."""
        if self._last is not None and not self._last.done():
            self.worker.kill()
        self._jobs.put((None, self.worker.close))
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        future, function, *arguments = job
        try:
            answer = function(*arguments)
        except BaseException as error:
            if future is None:
                logger.warning("closing an environment failed: %s: %s", type(error).__name__, error)
            else:
                future.set_exception(error)
        else:
            if future is not None:
                future.set_result(answer)


def _end(slots: set[_Slot]) -> None:
    for slot in slots:
        slot.end()
    slots.clear()
