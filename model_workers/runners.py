"""Runs the engine and the sender of a worker: two threads, or the event loop of a worker that computes nothing.

With threads, an engine that computes does not delay messages. An engine that forwards sequences to a server computes
nothing; in one event loop its sequences cost no switch between threads.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from threading import Condition, Thread, current_thread
from types import TracebackType
from typing import Final, Protocol

from sluice.startup import ENGINE_NICE

logger = logging.getLogger(__name__)

PACE_S: Final = 0.002
"""Minimum interval of sends by `LoopRunner`, in seconds; frames that arrive meanwhile share messages."""
JOIN_S: Final = 5.0
"""How long `ThreadRunner.stop` waits for each thread, in seconds."""


class Changes(Protocol):
    """Announces that there is work: the interface of `threading.Condition`."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

    def notify(self) -> None:
        """Wake one waiting thread."""

    def notify_all(self) -> None:
        """Wake all waiting threads."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification; return whether it came in time."""

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """Wait until `predicate` holds or the time is over; return its last result."""


class EnginePart(Protocol):
    """The engine's side of a worker; see `model_workers.worker.EngineLoop`."""

    @property
    def is_due(self) -> bool:
        """Whether there is a step to compute now."""

    @property
    def has_commands(self) -> bool:
        """Whether commands wait for the next turn."""

    def run(self) -> None:
        """Work until `stop`."""

    def stop(self) -> None:
        """Let `run` return."""

    def begin(self) -> None:
        """Prepare the first turn."""

    def turn(self) -> None:
        """Do the work that is due."""


class SenderPart(Protocol):
    """The sender's side of a worker; see `model_workers.sender.Sender`."""

    @property
    def next_due(self) -> float | None:
        """When something is due to be sent, in monotonic seconds; None: never."""

    def run(self) -> None:
        """Send until `stop`."""

    def stop(self) -> None:
        """Let `run` return when all is sent."""

    def turn(self) -> bool:
        """Send what is due; return whether there was anything."""

    def close(self) -> None:
        """End all requests."""


class ThreadRunner:
    """Runs engine and sender in a thread each."""

    def __init__(self, *, gives_way: bool = True) -> None:
        """Create the runner; with `gives_way` the engine's thread has a lower priority than those of messages."""
        self.changes_of_engine: Changes = Condition()
        self.changes_of_sender: Changes = Condition()
        self._gives_way = gives_way
        self._threads: list[Thread] = []

    def wake(self) -> None:
        """Let the engine's thread look for work that came through no command; from any thread."""
        with self.changes_of_engine:
            self.changes_of_engine.notify()

    def start(self, engine: EnginePart, sender: SenderPart, on_fault: Callable[[], None]) -> None:
        """Start both threads; call `on_fault` when one ends by an exception, which is logged."""
        compute = (lambda: _give_way_and(engine.run)) if self._gives_way else engine.run
        self._threads = [
            Thread(target=_guarded, args=(run, on_fault), name=name, daemon=True)
            for name, run in (("engine", compute), ("sender", sender.run))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, engine: EnginePart, sender: SenderPart) -> None:
        """Let the engine end its step, then the sender send what is left."""
        for stop, thread in zip((engine.stop, sender.stop), self._threads, strict=True):
            stop()
            thread.join(JOIN_S)
            if thread.is_alive():
                logger.warning("the %s thread did not end within %s s", thread.name, JOIN_S)


class _LoopChanges:
    """Announcements in one event loop, where nobody waits and nothing is locked."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.notify = self.notify_all = on_change

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *exception: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        return predicate()


class LoopRunner:
    """Runs engine and sender in turns in an event loop.

    Everything that arrives in one pass of the loop makes one turn. Steps wait until their reports can be sent, see
    `PACE_S`; commands do not. All methods must be called in that loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pace_s: float = PACE_S) -> None:
        self.changes_of_engine: Changes = _LoopChanges(self.wake)
        self.changes_of_sender: Changes = _LoopChanges(self.wake)
        self._loop, self._pace_s = loop, pace_s
        self._parts: tuple[EnginePart, SenderPart, Callable[[], None]] | None = None
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._send_at = 0.0

    def start(self, engine: EnginePart, sender: SenderPart, on_fault: Callable[[], None]) -> None:
        """Schedule the first turn; see `ThreadRunner.start`."""
        self._parts = engine, sender, on_fault
        engine.begin()
        self.wake()

    def stop(self, engine: EnginePart, sender: SenderPart) -> None:
        """End both parts; see `ThreadRunner.stop`."""
        self._parts = None
        if self._timer is not None:
            self._timer.cancel()
        engine.stop()
        sender.turn()
        sender.close()

    def wake(self) -> None:
        """Schedule a turn: there is work for the engine or the sender."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._parts is None:
            return
        engine, sender, on_fault = self._parts
        try:
            if engine.has_commands or time.monotonic() >= self._send_at:
                engine.turn()
            self._is_scheduled = False  # what the engine has posted is sent here
            now = time.monotonic()
            if now >= self._send_at and sender.turn():
                self._send_at = now + self._pace_s
        except Exception:
            logger.exception("the worker ended by a fault")
            on_fault()
            return
        self._set_timer(engine, sender)

    def _set_timer(self, engine: EnginePart, sender: SenderPart) -> None:
        """Schedule a turn for the next step or report; an earlier timer stays."""
        now = time.monotonic()
        if engine.is_due and now >= self._send_at:
            self.wake()
            return
        due_at = now if engine.is_due else sender.next_due
        if due_at is not None:
            due_at = max(due_at, self._send_at)
        if due_at is None or (self._timer is not None and now < self._timer_at <= due_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due_at
        # uvloop rounds to milliseconds: a timer that is too early would have turns in every pass until it is time.
        delay_ms = max(1, math.ceil(1000 * (self._timer_at - now)))
        self._timer = self._loop.call_later(delay_ms / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.wake()


def _give_way_and(run: Callable[[], None]) -> None:
    # Linux counts the priority of each thread; 0 is the calling thread. The threads that receive tasks and send frames
    # then do not wait for this one; the threads of torch that it starts give way as well.
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(mine, int(os.environ.get(ENGINE_NICE, "0"))))
    run()


def _guarded(run: Callable[[], None], on_fault: Callable[[], None]) -> None:
    try:
        run()
    except Exception:
        # The thread would end silently while heartbeats are still sent.
        logger.exception("the %s thread ended by a fault", current_thread().name)
        on_fault()
