"""Whether a server answers: it is asked for its list of models.

A worker whose server does not answer stays up and says so to batchers: the model is not ready then, requests for it are
refused at once or go to fallbacks, and nobody has to start anything again when the server is back.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from model_workers.remote.faults import ServerFault

logger = logging.getLogger(__name__)

AWAY_S: Final = 1.0
"""How often a server is asked that did not answer, in seconds."""
IDLE_S: Final = 10.0
"""How often one is asked that answered, in seconds; one that fails a request is asked at once."""
QUIET_S: Final = 10.0
"""Least time between two lines of the log about failed requests, in seconds."""
_NO_LIST: Final = 501
_REFUSALS: Final = (0, 401, 402, 403)
"""Statuses by which no request can succeed; 0: it cannot be reached. Other 4xx are of servers without such a list."""


class ServerHealth:
    """Watches one server.

    Args:
        name: of the server, for the log.
        ask: asks for its list; raises ServerFault.
        on_change: called when it went away or came back.

    Attributes:
        problem: why it does not answer, one sentence; empty while it does.
    """

    def __init__(
        self,
        name: str,
        ask: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self.problem = ""
        self._name = name
        self._ask = ask
        self._on_change = on_change
        self._doubted = asyncio.Event()
        self._quiet_until = -math.inf

    def doubt(self, reason: str) -> None:
        """Ask soon: a request has failed for `reason`, which the log gets, once in `QUIET_S`."""
        now = time.monotonic()
        if now >= self._quiet_until:
            logger.warning("server %s failed a request: %s", self._name, reason)
            self._quiet_until = now + QUIET_S
        self._doubted.set()

    async def look(self) -> None:
        """Ask now, and note what it says."""
        problem = ""
        try:
            await self._ask()
        except ServerFault as fault:
            is_down = fault.status >= 500 and fault.status != _NO_LIST
            if is_down or fault.status in _REFUSALS:
                problem = fault.message
            else:
                logger.debug("server %s gives no list of models: %s", self._name, fault.message)
        if problem != self.problem:
            if problem:
                logger.warning(
                    "server %s does not serve requests: %s (asking again every %g s)",
                    *(self._name, problem, AWAY_S),
                )
            else:
                logger.info("server %s serves requests again", self._name)
            self.problem = problem
            self._on_change()

    async def run(self) -> None:
        """Ask again and again, until it is cancelled."""
        while True:
            wait_s = AWAY_S if self.problem else IDLE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._doubted.wait(), wait_s)
            self._doubted.clear()
            await self.look()
