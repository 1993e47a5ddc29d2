"""The spending of tenants, told to the other gateways once a second, and kept in JetStream for an hour.

A gateway hears of the costs of another one with its next hello, at most `HELLO_S` later. JetStream is read at the start
and after a loss of messages, so a restart forgets at most the last second.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, Literal

from gateway.routing.budget import Costs, Spending
from gateway.shared.peers import Peers
from sluice.errors import SluiceError
from sluice.internal.v1.gateway_pb2 import GatewayHello, MinuteCosts
from sluice.wire.bucket import Bucket

_log = logging.getLogger(__name__)

_TOLD_MINUTES: Final = 2
"""In each hello: the present minute and the one before, which may have ended since the last hello."""


class SharedSpending:
    """Tells what this gateway's requests cost, while ``needed`` says that somebody asks.

    ``field`` of the hello has what was spent, by minutes or by days.
    """

    def __init__(
        self,
        spending: Spending,
        bucket: Bucket,
        peers: Peers,
        needed: Callable[[], bool],
        field: Literal["minutes", "days"] = "minutes",
    ) -> None:
        self._field = field
        self._spending = spending
        self._bucket = bucket
        self._instance = peers.instance
        self._needed = needed
        self._written: dict[int, Costs] = {}
        peers.fill.append(self._tell)
        peers.heard.append(self._hear)

    async def read(self) -> None:
        """Reads what all gateways have spent in the last hour; raises TransportUnavailable."""
        now = time.monotonic()
        async for key, stored in self._bucket.read_all(MinuteCosts):
            instance = key.partition(".")[0]
            if instance != self._instance:
                self._spending.told(instance, stored.minute, stored.costs, now)

    async def write(self) -> None:
        """Stores the minutes that have changed since the last call."""
        if not self._needed():
            return
        now = time.monotonic()
        current = {
            minute: dict(costs) for minute, costs in self._spending.own(now, self._spending.periods)
        }
        try:
            for minute, costs in current.items():
                if self._written.get(minute) != costs:
                    message = MinuteCosts(minute=minute, costs=costs)
                    await self._bucket.write(f"{self._instance}.{minute}", message)
                    self._written[minute] = costs
        except SluiceError as error:
            _log.warning("the spending of tenants was not stored: %s", error)
        self._written = {minute: self._written.get(minute, {}) for minute in current}

    def _tell(self, hello: GatewayHello) -> None:
        if self._needed():
            own = self._spending.own(time.monotonic(), _TOLD_MINUTES)
            told = getattr(hello, self._field)
            told.extend(MinuteCosts(minute=minute, costs=costs) for minute, costs in own)
            if self._field == "minutes":
                hello.reserved.update(self._spending.reserved)

    def _hear(self, hello: GatewayHello) -> None:
        now = time.monotonic()
        for told in getattr(hello, self._field):
            self._spending.told(hello.instance, told.minute, told.costs, now)
        if self._field == "minutes":
            self._spending.told_reserved(hello.instance, hello.reserved, now)
