"""A signal between loops that share state: whoever changes it notifies, whoever needs a change waits."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


class ChangeSignal:
    """Wakes all who wait at the time of a change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake everybody who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, bound_s: float | None = None) -> None:
        """Wait for the next change, at most `bound_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await self._changed.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked after each change."""
        while not holds():
            await self.wait()
