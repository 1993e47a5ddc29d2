"""An asyncio loop in virtual time, on which the processes of a simulated mesh run side by side.

Time jumps to the next timer when nothing is ready, so an hour of waiting costs nothing, and one seed always gives one
history. Every callback belongs to the process whose context it was made in: those of a stopped process wait until it
goes on, those of one that crashed never run. Each process has a wall clock that may be wrong, and all of them read the
loop's time as their monotonic clock.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final
from unittest.mock import patch

EPOCH_S: Final = 1.8e9
"""What a right wall clock shows at time 0."""

END_S: Final = 60.0

_PROCESS: ContextVar["SimulatedProcess | None"] = ContextVar("process", default=None)


class Stuck(AssertionError):
    """Somebody waits, and nothing will ever happen."""


class _Task(asyncio.Task[Any]):
    """A task whose hash is a number, so that sets of tasks have the same order in every run."""

    def __init__(self, number: int, *args: Any, **kwargs: Any) -> None:
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.BaseEventLoop):
    """See above. Ended by `close`, after which nothing of it runs any more."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()
        self.set_task_factory(
            lambda loop, coroutine, **kwargs: _Task(
                next(self._numbers), coroutine, loop=loop, **kwargs
            )
        )
        self.set_exception_handler(self._keep_fault)
        self.faults: list[dict[str, Any]] = []
        self.processes: list[SimulatedProcess] = []

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As usual."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As usual; what is due at the same moment runs in the order of the calls."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        """Without sockets, waiting means that time passes."""
        timers, ready = self._timers, self._ready  # type: ignore[attr-defined]
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if not (ready or self._stopping):  # type: ignore[attr-defined]
            if not timers:
                raise Stuck(f"at {self._now:.3f} s")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            process = handle._context.get(_PROCESS)
            if not handle.cancelled() and (process is None or process.admits(handle)):
                handle._run()

    def again(self, handles: Sequence[asyncio.Handle]) -> None:
        """Runs handles that could not run in time."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def _keep_fault(self, _: asyncio.AbstractEventLoop, fault: dict[str, Any]) -> None:
        self.faults.append(fault)

    def _process_events(self, events: Sequence[Any]) -> None:
        assert not events

    def _write_to_self(self) -> None:
        """There is no selector to wake."""


class SimulatedProcess:
    """One process of the mesh: a group of tasks that stop and end together.

    Attributes:
        name: for messages.
        skew_s: how far its wall clock is ahead.
        alive: it has not crashed.
        threads: see `tests.simulated_mesh.threads`.
    """

    def __init__(self, loop: VirtualLoop, name: str, skew_s: float = 0.0) -> None:
        self.name, self.skew_s = name, skew_s
        self.alive, self._stopped = True, False
        self.loop = loop
        self.threads: list[Any] = []
        loop.processes.append(self)
        self._held: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._context = copy_context()
        self._context.run(_PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs ``work`` as a task of this process."""
        task = self.loop.create_task(work, context=self._context.copy())
        self._tasks.append(task)  # the loop itself keeps none
        return task

    def soon(
        self, act: Callable[..., object], *args: Any, delay_s: float = 0.0
    ) -> asyncio.TimerHandle:
        """Calls ``act`` in this process after ``delay_s``; a stopped process does it when it goes on."""
        at = self.loop.time() + delay_s
        return self.loop.call_at(at, act, *args, context=self._context.copy())

    @property
    def running(self) -> bool:
        """Whether it has neither crashed nor stands still."""
        return self.alive and not self._stopped

    def admits(self, handle: asyncio.Handle) -> bool:
        """Whether a callback of this process runs now; else it is kept for later, after a crash for `_end`."""
        if not self.running:
            self._held.append(handle)
        return self.running

    def stop(self) -> None:
        """SIGSTOP."""
        self._stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        self._stopped = False
        held, self._held = self._held, []
        self.loop.again(held)

    def crash(self) -> None:
        """SIGKILL."""
        self.alive = False
        self.end_threads()

    def end_threads(self) -> None:
        """They wait for ever otherwise."""
        threads, self.threads = self.threads, []
        for thread in threads:
            thread.end()


def here() -> SimulatedProcess | None:
    """The process whose code runs now."""
    return _PROCESS.get()


def _wall(loop: VirtualLoop) -> float:
    process = here()
    return EPOCH_S + loop.time() + (process.skew_s if process is not None else 0.0)


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """A loop whose time all clocks of Python show while the block runs."""
    loop = VirtualLoop()
    clocks = {
        "monotonic": loop.time,
        "time": lambda: _wall(loop),
        "time_ns": lambda: int(_wall(loop) * 1e9),
    }
    with patch.multiple(time, **clocks):
        try:
            yield loop
        finally:
            _end(loop)


def _end(loop: VirtualLoop) -> None:
    """Cancels what still runs, also what crashed: else it would end when its garbage is collected, at any time.

    A task that had not begun when its process crashed needs its first callback for that.
    """
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    for process in loop.processes:
        process.end_threads()
        process.alive = True
        process.go_on()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=END_S))
    loop.close()
