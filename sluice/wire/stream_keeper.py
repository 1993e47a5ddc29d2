"""Streams of a process that is up: made again where NATS has lost them, and a reason while they cannot be.

A server whose volume was lost comes back without streams, and says nothing of it. So the owner of streams looks when it
is connected again, and now and then.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from nats.errors import Error as NatsError

from sluice.background import wait_for_event
from sluice.errors import TransportUnavailable
from sluice.wire.jetstream import explained

logger = logging.getLogger(__name__)

CHECK_S: Final = 30.0
"""How often the streams are looked at while the connection stands, in seconds."""
RETRY_S: Final = 2.0
"""Wait before the next try to make them, in seconds."""
REPEAT_S: Final = 60.0
"""The reason why they cannot be made is logged this often, in seconds."""


class StreamKeeper:
    """Makes the streams of a process again, until `run` is cancelled.

    Attributes:
        problem: why streams cannot be used, in words for people; empty: they can.
    """

    def __init__(
        self, restore: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep streams: `restore` makes those that are missing, and raises what JetStream raises."""
        self.problem = ""
        self._restore = restore
        self._clock = clock
        self._logged_at = float("-inf")
        self._due = asyncio.Event()

    def check_soon(self) -> None:
        """Look at the streams now: the connection was lost, or one of them did not answer."""
        self._due.set()

    async def run(self) -> None:
        """Look at the streams until it is cancelled."""
        while True:
            await wait_for_event(self._due, RETRY_S if self.problem else CHECK_S)
            self._due.clear()
            await self.check()

    async def check(self) -> None:
        """Look at the streams once."""
        try:
            await self._restore()
        except (TimeoutError, NatsError, TransportUnavailable) as error:
            self._failed(error)
            return
        except Exception:  # the loop would end, and with it others of its process
            logger.exception("check of streams failed")
            return
        if self.problem:
            logger.info("streams are available again")
        self.problem, self._logged_at = "", float("-inf")

    def _failed(self, error: Exception) -> None:
        self.problem = f"JetStream does not take streams: {explained(error)}"
        now = self._clock()
        if now - self._logged_at >= REPEAT_S:
            self._logged_at = now
            logger.warning("streams are unavailable, jobs, records and keys fail: %s", self.problem)
