"""Tasks that nobody awaits one by one, kept until they end since the event loop holds no reference; a bounded wait."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


async def wait_for_event(event: asyncio.Event, timeout_s: float | None) -> None:
    """Return when `event` is set, or after `timeout_s` seconds (None: never before)."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


class BackgroundTasks:
    """The tasks that one object has started and that have not ended.

    `on_fault` gets the exception of a task that failed; without it asyncio logs the exception.
    """

    def __init__(self, on_fault: Callable[[Exception], None] | None = None) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._on_fault = on_fault

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on the running loop."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def settle(self, timeout_s: float) -> None:
        """Wait until the tasks that run now have ended, or for `timeout_s` seconds."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    def cancel(self) -> None:
        """Cancel the running tasks."""
        for task in self._running:
            task.cancel()

    async def close(self) -> None:
        """Cancel the running tasks and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._on_fault is None or task.cancelled():
            return
        if isinstance(fault := task.exception(), Exception):
            self._on_fault(fault)
