"""Threads in virtual time: greenlets that wait as tasks of the loop do, so that one runs at a time."""

from collections.abc import Callable, Sequence
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from tests.simulated_mesh.loop import SimulatedProcess, here


class SimulatedThread:
    """Takes the place of `threading.Thread` in a process of the mesh."""

    def __init__(
        self,
        target: Callable[..., None],
        args: Sequence[Any] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        self.name = name
        process = here()
        assert process is not None
        self.process: SimulatedProcess = process
        self._greenlet = _Greenlet(lambda: target(*args))
        self._greenlet.thread = self

    def start(self) -> None:
        """Begins at the next turn of the loop."""
        self.process.threads.append(self)
        self.process.soon(self.resume)

    def resume(self) -> None:
        """Runs until the thread waits again. Called by the loop."""
        if not self._greenlet.dead:
            self._greenlet.parent = getcurrent()
            self._greenlet.switch()

    def end(self) -> None:
        """The process has ended."""
        self._greenlet.parent = getcurrent()
        self._greenlet.throw(GreenletExit)

    def pause(self) -> None:
        """Gives control back to the loop until `resume`. Called by the thread."""
        parent = self._greenlet.parent
        assert parent is not None
        parent.switch()

    def sleep(self, seconds: float) -> None:
        """Called by the thread."""
        self.process.soon(self.resume, delay_s=seconds)
        self.pause()


class _Greenlet(greenlet):
    thread: SimulatedThread


def this_thread() -> SimulatedThread | None:
    """The thread that runs now; None: the loop."""
    return getattr(getcurrent(), "thread", None)


def _waiting_thread() -> SimulatedThread:
    thread = this_thread()
    assert thread is not None, "the loop must not wait"
    return thread


class SimulatedCondition:
    """Takes the place of `threading.Condition`: a lock is not needed, since one thread runs at a time."""

    def __init__(self) -> None:
        self._waiting: dict[SimulatedThread, None] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify(self) -> None:
        """All the same as `notify_all`: each looks for itself."""
        self.notify_all()

    def notify_all(self) -> None:
        """Those who wait look again."""
        for thread in list(self._waiting):
            del self._waiting[thread]
            thread.process.soon(thread.resume)

    def wait_for(self, holds: Callable[[], Any], timeout: float | None = None) -> Any:
        """As usual."""
        if result := holds():
            return result
        loop = _waiting_thread().process.loop
        until = None if timeout is None else loop.time() + timeout
        while not (result := holds()):
            if until is not None and loop.time() >= until:
                break
            self.wait(None if until is None else until - loop.time())
        return result

    def wait(self, timeout: float | None = None) -> None:
        """As usual."""
        thread, timer = _waiting_thread(), None
        self._waiting[thread] = None
        if timeout is not None:
            timer = thread.process.soon(self._wake, thread, delay_s=timeout)
        thread.pause()
        if timer is not None:
            timer.cancel()

    def _wake(self, thread: SimulatedThread) -> None:
        if thread in self._waiting:
            del self._waiting[thread]
            thread.resume()
