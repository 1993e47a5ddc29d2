"""When messages to batchers leave: at the end of a turn of the event loop, or a moment later, to share their cost.

The latency budget (docs/internals/wire.md, Latency budget) lists every delay of the mesh; this is the gateway's.
"""

import asyncio
from typing import Final

UNREAD_S: Final = 0.025
"""Maximum delay of a bulk task whose answer nobody reads in parts, in seconds. Items of jobs then leave together, which
costs NATS and the batcher less, and such an answer takes seconds."""


class Coalescer:
    """Signals to the one task that sends messages when they are due."""

    def __init__(self) -> None:
        self._is_due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def notify(self, may_wait: bool) -> None:
        """Signal that there is a message, which may wait for others or is due with the next turn of the loop."""
        if not may_wait:
            self._is_due.set()
        elif self._timer is None and not self._is_due.is_set():
            self._timer = asyncio.get_running_loop().call_later(UNREAD_S, self._is_due.set)

    async def wait(self) -> None:
        """Return when messages are due."""
        await self._is_due.wait()
        self._is_due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
