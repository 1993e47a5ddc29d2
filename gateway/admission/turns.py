"""When a bulk call begins: while the event loop has nothing more urgent to do.

gRPC hands calls over in order of arrival, one in each turn of the loop, whatever their class. Work for a bulk call
makes every turn longer, and so the wait of an interactive call behind thousands of them. So bulk calls are only taken
over at first, and begin, one at a time, when no call has come for a moment and the loop has had little to do; a few
begin in any case.
"""

import asyncio
import time
from collections import deque
from typing import Final

from sluice.errors import Overloaded

MOMENT_S: Final = 0.001
BUSY_S: Final = 0.005
"""A loop that computes for longer than this in a moment has more to do than it can."""
PATIENCE_S: Final = 0.02
"""How often a call begins although the loop is busy, seconds."""
WAITING_MAX: Final = 16_384
RETRY_AFTER_S: Final = 1.0


class Turns:
    """The calls of one gateway, over gRPC and HTTP."""

    def __init__(self) -> None:
        self._arrived = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._giving: asyncio.Task[None] | None = None

    def arrived(self) -> None:
        """A call has come, of any class."""
        self._arrived += 1

    async def turn(self) -> None:
        """Returns when the next bulk call may begin.

        Raises:
            Overloaded: too many wait.
        """
        if len(self._waiting) >= WAITING_MAX:
            message = f"{WAITING_MAX} bulk calls wait for their turn"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._give())
        await mine

    async def _give(self) -> None:
        loop = asyncio.get_running_loop()
        given_at = loop.time()
        while self._waiting:
            arrived, used_s = self._arrived, time.thread_time()
            await asyncio.sleep(MOMENT_S)
            # Not the time that has passed: a process that waits for a core gains nothing by waiting longer.
            busy_s, now = time.thread_time() - used_s, loop.time()
            calm = self._arrived == arrived and busy_s < BUSY_S
            if calm or now - given_at > PATIENCE_S:
                given_at = now
                self._give_next()

    def _give_next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # its caller has not gone
                first.set_result(None)
                return
