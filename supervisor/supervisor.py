"""Runs the processes of a mesh: starts them in order, restarts those that end, stops them stage by stage."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

from sluice.background import wait_for_event
from sluice.core_dumps import forbid_core_dumps
from sluice.errors import SetupError
from supervisor.child import Child, ChildSpec, describe_exit, keep_log_small, log_tail
from supervisor.orphans import OrphanReaper
from supervisor.state import ProcessState

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 5.0
"""Bounds of the wait before a process is started again, in seconds."""
STEADY_S: Final = 5.0
"""A process that ran for this long is started again at once, in seconds."""
Watcher = Callable[[Child], Awaitable[None]]
"""Runs with each run of a process and is cancelled when the process ends. When it fails, the process is restarted."""


class Backoff:
    """The waits before restarts: none after a run of `STEADY_S` and the first time, then ever longer."""

    def __init__(self) -> None:
        self._wait_s = 0.0

    def after(self, ran_s: float) -> float:
        """Return the wait after a run, in seconds."""
        wait_s = 0.0 if ran_s >= STEADY_S else self._wait_s
        self._wait_s = min(max(2 * wait_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
        return wait_s


class SupervisedProcess:
    """One process that is kept running: started, restarted when it ends by itself, and stopped when asked.

    Attributes:
        spec: what runs.
        restarts: how often it was started again.
        child: the present run; None between two runs.
        failed_start: done with the exit code once the first run has ended; where a signal ended it, once the second
            one has: on a busy machine a Triton crashes at times while it starts, and the next one does not.
        first_log_start: how long the log was before the first run, bytes.
    """

    def __init__(
        self, spec: ChildSpec, on_change: Callable[[], None], watcher: Watcher | None = None
    ) -> None:
        """Start the process, and restart it from now on. Raises OSError if the first start fails."""
        self.spec, self.restarts = spec, 0
        self.failed_start: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._on_change, self._watcher = on_change, watcher
        self._stop_asked = asyncio.Event()
        self.child: Child | None = Child(spec)
        self.first_log_start = self.child.log_start
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {spec.name}")

    async def stop(self) -> None:
        """End the process within its bound, for good."""
        self._stop_asked.set()
        if self.child is not None:
            code = await self.child.end(self.spec.stop_s)
            by_parts = "killed once its models had ended"
            how = by_parts if self.child.ended_by_parts else describe_exit(code)
            logger.info("stopped %s (%s)", self.spec.name, how)
        await self._task

    def kill_now(self) -> None:
        """Kill the process with its group, for good; block only until the kernel has ended it."""
        self._task.cancel()
        if self.child is not None:
            self.child.kill_now()

    @property
    def state(self) -> ProcessState:
        """The process, as the state file has it."""
        return ProcessState(
            name=self.spec.name,
            pid=self.child.pid if self.child else None,
            started_unix_ms=self.child.started_unix_ms if self.child else None,
            restarts=self.restarts,
            port=self.spec.port,
            log=str(self.spec.log) if self.spec.log else None,
            page=self.spec.page,
        )

    async def _supervise(self) -> None:
        backoff, began = Backoff(), time.monotonic()
        while True:
            why = "it could not be started"
            if self.child is not None:
                why = describe_exit(await self._run(self.child))
                self.child = None
            if not self._stop_asked.is_set():
                wait_s = backoff.after(time.monotonic() - began)
                logger.warning("%s ended (%s); next start in %.1f s", self.spec.name, why, wait_s)
                self._on_change()
                await wait_for_event(self._stop_asked, wait_s)
            if self._stop_asked.is_set():
                self._on_change()
                return
            began = time.monotonic()
            try:
                self.child = Child(self.spec)
                self.restarts += 1
                self._on_change()
            except OSError as error:
                # No memory or no process numbers left: treated as an exit; the others keep running.
                logger.error("start of %s failed: %s", self.spec.name, error)

    async def _run(self, child: Child) -> int:
        """Wait for the end of `child`, with the watcher running."""
        watching = []
        if self._watcher is not None:
            watching.append(asyncio.create_task(self._watch(self._watcher, child)))
        if self.spec.log is not None:
            watching.append(asyncio.create_task(keep_log_small(self.spec.log)))
        code = await child.exited
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        if not self.failed_start.done() and (code >= 0 or self.restarts):
            self.failed_start.set_result(code)
        return code

    async def _watch(self, watcher: Watcher, child: Child) -> None:
        try:
            await watcher(child)
        except Exception:  # its task would end silently, and the process would run unwatched
            logger.exception("the watcher of %s failed; restarting it", self.spec.name)
            child.send(signal.SIGKILL)


class Supervisor:
    """Processes by name, in start order."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start the reaper, and forbid core dumps of this process and its children.

        `on_change` is called after every change of any process; it must not block for long.
        """
        forbid_core_dumps()
        self.pid = os.getpid()
        self.started_unix_ms = time.time_ns() // 1_000_000
        self._processes: dict[str, SupervisedProcess] = {}
        self._on_change = on_change
        self._reaper = OrphanReaper()
        self._changed = asyncio.Event()

    def start(self, spec: ChildSpec, watcher: Watcher | None = None) -> SupervisedProcess:
        """Start `spec` and restart it until `stop`.

        Raises:
            SetupError: the process cannot be started.
        """
        assert spec.name not in self._processes, f"{spec.name} is started already"
        try:
            process = SupervisedProcess(spec, self._note_change, watcher)
        except OSError as error:
            raise SetupError(f"{spec.name} cannot be started: {error}") from error
        self._processes[spec.name] = process
        self._note_change()
        return process

    def process(self, name: str) -> SupervisedProcess:
        """Return the process called `name`; KeyError if there is none."""
        return self._processes[name]

    @property
    def pids(self) -> dict[str, int]:
        """Pids of what runs now, by name."""
        return {
            name: process.child.pid for name, process in self._processes.items() if process.child
        }

    @property
    def states(self) -> tuple[ProcessState, ...]:
        """All processes, as the state file has them."""
        return tuple(process.state for process in self._processes.values())

    @property
    def stop_s(self) -> float:
        """How long `stop` may take, seconds."""
        return sum(max(one.spec.stop_s for one in stage) for stage in self._stages())

    async def wait_for(self, condition: Callable[[], bool], bound_s: float) -> None:
        """Wait until `condition` holds; it is checked after every change.

        Raises:
            TimeoutError: it did not hold in time.
        """
        async with asyncio.timeout(bound_s):
            while not condition():
                await self._changed.wait()

    async def end(self, name: str) -> None:
        """End a process for good, and forget it."""
        process = self._processes[name]
        await process.stop()
        del self._processes[name]
        self._note_change()

    async def during_start(
        self, ready: Awaitable[_T], starting: Iterable[SupervisedProcess] | None = None
    ) -> _T:
        """Wait for `ready`; a process that ends meanwhile is an error, because it would end again after a restart.

        `starting` are those that count; by default all. One that a signal ended counts when it ends once more.
        Errors of `ready` pass through.

        Raises:
            SetupError: a process ended; the message names its log and its last lines.
        """
        waiting = asyncio.ensure_future(ready)
        counted = self._processes.values() if starting is None else starting
        exits = {process.failed_start: process for process in counted}
        try:
            pending: list[asyncio.Future[Any]] = [waiting, *exits]
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for ended, process in exits.items():
                if ended.done():
                    raise _start_problem(process, ended.result())
            return await waiting
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def stop(self) -> None:
        """End all, the highest stage first, each within its bound, for good.

        When cancelled, kills what is left at once.
        """
        try:
            for stage in self._stages():
                await asyncio.gather(*(process.stop() for process in stage))
        finally:
            for process in self._processes.values():
                process.kill_now()
            self._reaper.close()

    def _stages(self) -> list[list[SupervisedProcess]]:
        """Return the processes by stage, in the order in which they end."""
        stages = sorted({process.spec.stage for process in self._processes.values()}, reverse=True)
        return [
            [one for one in self._processes.values() if one.spec.stage == stage] for stage in stages
        ]

    def _note_change(self) -> None:
        self._reaper.watch(self.pids.values())
        self._on_change()
        self._changed.set()
        self._changed = asyncio.Event()


def _start_problem(process: SupervisedProcess, code: int) -> SetupError:
    name, log = process.spec.name, process.spec.log
    if log is None:
        return SetupError(f"{name} ended while starting ({describe_exit(code)})")
    last_lines = log_tail(log, process.first_log_start)
    return SetupError(
        f"{name} ended while starting ({describe_exit(code)}); log {log}: {last_lines}"
    )
