"""Keeps one process up: starts it, starts it again when it ends by itself, ends it when asked."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from supervisor.child import Child, ChildSpec, exit_words
from supervisor.lifecycle import Lifecycle
from supervisor.state import ProcessState

logger = logging.getLogger(__name__)

Companion = Callable[[Child], Awaitable[None]]
"""Runs beside each run of a process and is cancelled when the process ends."""


class Unit:
    """A process with its restarts.

    Attributes:
        spec: what runs.
        life: its phase and restarts.
        child: the present run; None between two runs.
        reloads: how often the companion repaired it without a restart.
        first_exit: done with the exit code once the first run has ended.
        first_log_start: how long the log was before the first run, bytes.
    """

    def __init__(
        self, spec: ChildSpec, on_change: Callable[[], None], companion: Companion | None = None
    ) -> None:
        self.spec = spec
        self.life = Lifecycle()
        self.child: Child | None = None
        self.reloads = 0
        self.first_exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.first_log_start = 0
        self._on_change = on_change
        self._companion = companion
        self._stop_asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the process; from now on it is kept up. OSError when it cannot be started at all."""
        self.first_log_start = self._spawn().log_start
        self._task = asyncio.create_task(self._keep_up(), name=f"keep {self.spec.name} up")

    def reloaded(self) -> None:
        """Counts a repair by the companion."""
        self.reloads += 1
        self._on_change()

    async def stop(self) -> None:
        """Ends the process within its bound, for good."""
        self.life.stop()
        self._stop_asked.set()
        self._on_change()
        if self.child is not None:
            code = await self.child.end(self.spec.stop_s)
            logger.info("%s has ended: %s", self.spec.name, exit_words(code))
        if self._task is not None:
            await self._task

    def kill_now(self) -> None:
        """Ends the process without waiting for anything."""
        if self._task is not None:
            self._task.cancel()
        if self.child is not None:
            self.child.kill_now()

    @property
    def state(self) -> ProcessState:
        """For the state file."""
        return ProcessState(
            name=self.spec.name,
            phase=self.life.phase.value,
            pid=self.child.pid if self.child else None,
            started_unix_ms=self.child.started_unix_ms if self.child else None,
            restarts=self.life.restarts,
            reloads=self.reloads,
            port=self.spec.port,
            log=str(self.spec.log) if self.spec.log else None,
        )

    def _spawn(self) -> Child:
        self.child = Child(self.spec)
        self.life.started(time.monotonic())
        self._on_change()
        return self.child

    def _spawn_again(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            # No memory, no process numbers left: as good as an exit, and no reason to give the others up.
            logger.error("%s could not be started: %s", self.spec.name, error)

    async def _keep_up(self) -> None:
        again = True
        while again:
            why = "it could not be started"
            if self.child is not None:
                why = exit_words(await self._run(self.child))
                self.child = None
            again = await self._wait_for_turn(why)
            if again:
                self._spawn_again()
        self._on_change()

    async def _wait_for_turn(self, why: str) -> bool:
        """After an end: waits until the next start; False when there shall be none."""
        if self.life.ending:
            self.life.stopped()
            return False
        wait_s = self.life.exited(time.monotonic())
        logger.warning("%s ended (%s); next start in %.1f s", self.spec.name, why, wait_s)
        self._on_change()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop_asked.wait(), wait_s)
        return not self._stop_asked.is_set()

    async def _run(self, child: Child) -> int:
        """Waits for the end of ``child``, with the companion beside it."""
        beside = self._begin_companion(child)
        code = await child.exited
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
        if not self.first_exit.done():
            self.first_exit.set_result(code)
        return code

    def _begin_companion(self, child: Child) -> asyncio.Task[None] | None:
        if self._companion is None:
            return None
        return asyncio.create_task(self._accompany(self._companion, child))

    async def _accompany(self, companion: Companion, child: Child) -> None:
        try:
            await companion(child)
        except Exception:
            # Its task would end silently, and with it the watch over the process.
            logger.exception("the watch over %s failed; restarting it", self.spec.name)
            child.send(signal.SIGKILL)
