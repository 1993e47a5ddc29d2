"""When the next bulk call may begin: one at a time, while the event loop has nothing more urgent to do.

gRPC hands calls over in order of arrival, one in each pass of the event loop, whatever their class. Work for a bulk
call makes every pass longer, and so the wait of an interactive call behind thousands of them. So a bulk call is only
taken over at first. It begins after a calm moment: no call came, and the loop computed little. After
`BUSY_MOMENTS_MAX` busy moments one begins all the same, so bulk work never stands still.
"""

import asyncio
import math
import time
from collections import deque
from typing import Final

from gateway.admission.count_limit import overloaded

MOMENT_S: Final = 0.001
"""How long the loop is watched before a bulk call begins, in seconds: shorter than most work for one call."""
BUSY_S: Final = 0.005
"""CPU time of the loop in a moment from which on the moment was busy, in seconds: more than one call takes."""
BUSY_MOMENTS_MAX: Final = 4
"""Busy moments in succession after which a bulk call begins anyway: about 20 ms of a loop that only computes."""
WAITING_MAX: Final = 16_384
"""Bulk calls of a gateway that may wait; a call that waits holds its message in memory."""


class BulkPacer:
    """Lets bulk calls begin, in order of arrival.

    Attributes:
        arrived_at: When the last call of any class came, in monotonic seconds.
    """

    def __init__(
        self, waiting_max: float = WAITING_MAX, busy_moments_max: int = BUSY_MOMENTS_MAX
    ) -> None:
        """Let up to `waiting_max` calls wait; see `BUSY_MOMENTS_MAX`."""
        self.arrived_at = -math.inf
        self._waiting_max = waiting_max
        self._busy_moments_max = busy_moments_max
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._pacing: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return len(self._waiting)

    def on_arrival(self) -> None:
        """Note that a call has come, of whatever class."""
        self.arrived_at = time.monotonic()

    async def wait(self, *, is_bounded: bool = True) -> None:
        """Wait until the next bulk call may begin.

        Args:
            is_bounded: Whether too many waiting calls refuse this one; entries of a call wait without bound, because
                their call is read no faster than they begin.

        Raises:
            Overloaded: Too many calls wait.
        """
        if is_bounded and len(self._waiting) >= self._waiting_max:
            raise overloaded("bulk_waiting", f"{self._waiting_max} bulk calls wait to begin")
        turn = asyncio.Future[None]()
        self._waiting.append(turn)
        if self._pacing is None or self._pacing.done():
            self._pacing = asyncio.create_task(self._pace())
        await turn

    async def _pace(self) -> None:
        busy_moments = 0
        while self._waiting:
            begun_at, used_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(MOMENT_S)
            # CPU time, not the time that has passed: a process that waits for a core gains nothing by waiting longer.
            is_calm = self.arrived_at < begun_at and time.thread_time() - used_s < BUSY_S
            busy_moments = 0 if is_calm else busy_moments + 1
            if is_calm or busy_moments >= self._busy_moments_max:
                busy_moments = 0
                self._begin_next()

    def _begin_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its caller has not gone
                turn.set_result(None)
                return
