"""Watches whether a server responds, by listing its models.

A worker whose server does not respond stays up and reports it to batchers: the model is not ready then, its requests
are refused at once or use fallbacks, and nothing needs a restart when the server is back.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

from model_workers.remote.faults import ServerFault
from sluice.background import wait_for_event

logger = logging.getLogger(__name__)

AWAY_S: Final = 1.0
"""Interval of checks of a server that did not respond, in seconds."""
IDLE_S: Final = 10.0
"""Interval of checks of a server that responded, in seconds; one that fails a request is checked at once."""
QUIET_S: Final = 10.0
"""Minimum time between two log lines about failed requests, in seconds."""
_NO_LIST: Final = 501
_REFUSALS: Final = (0, 401, 402, 403)
"""Statuses by which no request can succeed; 0: unreachable. Other 4xx come from servers without such a list."""


class ServerHealth:
    """Watches one server.

    Args:
        name: Name of the server, for the log.
        ask: Lists its models; raises ServerFault.
        on_change: Called when the server's health changes.

    Attributes:
        problem: Why it does not respond, in one sentence; empty while it does.
    """

    def __init__(
        self, name: str, ask: Callable[[], Awaitable[None]], on_change: Callable[[], None]
    ) -> None:
        self.problem = ""
        self._name = name
        self._ask = ask
        self._on_change = on_change
        self._doubted = asyncio.Event()
        self._quiet_until = -math.inf

    def doubt(self, reason: str) -> None:
        """Check soon, because a request has failed for `reason`, which is logged once in `QUIET_S`."""
        now = time.monotonic()
        if now >= self._quiet_until:
            logger.warning("server %s failed a request: %s", self._name, reason)
            self._quiet_until = now + QUIET_S
        self._doubted.set()

    async def look(self) -> None:
        """Check now, and record the result."""
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
        """Check until cancelled."""
        while True:
            wait_s = AWAY_S if self.problem else IDLE_S
            await wait_for_event(self._doubted, wait_s)
            self._doubted.clear()
            await self.look()
