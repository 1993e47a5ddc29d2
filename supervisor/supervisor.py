"""Holds the processes of a mesh: starts them in order, keeps them up, ends them in reverse order."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sluice.errors import SetupError
from supervisor.child import ChildSpec, exit_words, last_words
from supervisor.guardian import Guardian
from supervisor.state import ProcessState
from supervisor.unit import Companion, Unit

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Supervisor:
    """Units by name, in start order.

    Every method belongs to the event loop's thread: children die with the thread that started them.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """``on_change`` is called after every change of any unit; it must not block for long."""
        self.pid = os.getpid()
        self.started_unix_ms = time.time_ns() // 1_000_000
        self._units: dict[str, Unit] = {}
        self._on_change = on_change
        self._guardian = Guardian()
        self._changed = asyncio.Event()

    def start(self, spec: ChildSpec, companion: Companion | None = None) -> Unit:
        """Starts ``spec`` and keeps it up until `stop`.

        Raises:
            SetupError: this machine lets no process start.
        """
        assert spec.name not in self._units, f"{spec.name} is started already"
        unit = Unit(spec, self._note_change, companion)
        try:
            unit.start()
        except OSError as error:
            raise SetupError(f"{spec.name} cannot be started: {error}") from error
        self._units[spec.name] = unit
        self._note_change()
        return unit

    def unit(self, name: str) -> Unit:
        """The unit called ``name``; KeyError when there is none."""
        return self._units[name]

    @property
    def pids(self) -> dict[str, int]:
        """Pids of what runs now, by name."""
        return {name: unit.child.pid for name, unit in self._units.items() if unit.child}

    @property
    def states(self) -> tuple[ProcessState, ...]:
        """For the state file."""
        return tuple(unit.state for unit in self._units.values())

    @property
    def stop_s(self) -> float:
        """How long `stop` may take, seconds."""
        return sum(unit.spec.stop_s for unit in self._units.values())

    async def wait_for(self, condition: Callable[[], bool], bound_s: float) -> None:
        """Returns as soon as ``condition`` holds; it is looked at after every change.

        Raises:
            TimeoutError: it did not hold in time.
        """
        async with asyncio.timeout(bound_s):
            while not condition():
                await self._changed.wait()

    async def during_start(self, ready: Awaitable[_T]) -> _T:
        """Waits for ``ready``, as long as no process ends: while starting that is no accident but a mistake.

        Raises:
            SetupError: a process ended; the message names its log and its last lines.
        """
        waiting = asyncio.ensure_future(ready)
        exits = {unit.first_exit: unit for unit in self._units.values()}
        try:
            pending: list[asyncio.Future[Any]] = [waiting, *exits]
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for ended, unit in exits.items():
                if ended.done():
                    raise _start_problem(unit, ended.result())
            return await waiting
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def stop(self) -> None:
        """Ends all in reverse order, each within its bound, for good. When cancelled, kills what is left at once."""
        try:
            for unit in reversed(self._units.values()):
                await unit.stop()
        finally:
            for unit in self._units.values():
                unit.kill_now()
            self._guardian.close()

    def _note_change(self) -> None:
        self._guardian.guard(self.pids.values())
        self._on_change()
        self._changed.set()
        self._changed = asyncio.Event()


def _start_problem(unit: Unit, code: int) -> SetupError:
    name, log = unit.spec.name, unit.spec.log
    if log is None:
        return SetupError(f"{name} ended while starting ({exit_words(code)})")
    said = last_words(log, unit.first_log_start)
    return SetupError(f"{name} ended while starting ({exit_words(code)}); log {log}: {said}")
