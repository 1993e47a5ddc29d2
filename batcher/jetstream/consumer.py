"""Pulls the tasks of one durable consumer, which gateways create.

One request is always open at the server, and costs nothing while it waits.

A pull requests as many messages as there is room for, expires after a minute, and has heartbeats; when they are missing
(after a restart of NATS, for example) it is requested again.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from sluice.wire import subjects

log = logging.getLogger(__name__)

EXPIRES_S: Final = 60.0
HEARTBEAT_S: Final = 5.0
SILENCE_MAX_S: Final = 2.5 * HEARTBEAT_S
RETRY_S: Final = 0.5
DRAIN_S: Final = 2.0

_HEARTBEAT: Final = "100"
_EXPIRED: Final = "408"
_ENDS: Final = frozenset({"Message Size Exceeds MaxBytes", "Batch Completed"})
"""The status of a finished pull."""


class Puller:
    """The open pull of one consumer.

    Args:
        room: how many tasks may come now.
        room_bytes: how many bytes of them, about.
        on_task: takes one message.
    """

    def __init__(
        self,
        nats_client: Client,
        consumer: str,
        room: Callable[[], int],
        room_bytes: Callable[[], int],
        on_task: Callable[[Msg], Awaitable[None]],
    ) -> None:
        self._nats = nats_client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.TASKS_STREAM}.{consumer}"
        self._room = room
        self._room_bytes = room_bytes
        self._on_task = on_task
        self._inbox = nats_client.new_inbox()
        # The next message fits, with its headers: a pull that it does not fit into would end at once, again and again.
        self._bytes_min = 2 * nats_client.max_payload
        self._numbers = 0
        self._missing = 0
        self._failure = ""
        self._told = ""
        self._heard = asyncio.Event()
        self._roomy = asyncio.Event()
        self._full = False

    def nudge(self) -> None:
        """Call when there may be more room."""
        if self._full and self._room() > 0:
            self._roomy.set()

    def restart(self) -> None:
        """Requests the pull again, because the server has lost it."""
        self._missing = 0
        self._heard.set()

    async def run(self) -> None:
        """Pulls until it is cancelled; messages in flight are taken before this returns."""
        subscription = await self._nats.subscribe(f"{self._inbox}.*", cb=self._take)
        try:
            while True:
                await self._pull(await self._wait_for_room())
                if self._failure:
                    await self._wait_to_retry()
        finally:
            await _drain(subscription)

    async def _wait_for_room(self) -> int:
        while (room := self._room()) <= 0:
            self._roomy.clear()
            self._full = True
            await self._roomy.wait()
        self._full = False
        return room

    async def _pull(self, room: int) -> None:
        self._numbers += 1
        self._missing, self._failure = room, ""
        request = {
            "batch": room,
            "max_bytes": max(self._room_bytes(), self._bytes_min),
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        reply = f"{self._inbox}.{self._numbers}"
        try:
            await self._nats.publish(self._subject, json.dumps(request).encode(), reply=reply)
            await self._wait_for_messages()
        except TimeoutError:
            self._failure = "no sign of life"
        except nats.errors.Error as error:
            self._failure = str(error)

    async def _wait_for_messages(self) -> None:
        while self._missing > 0:
            self._heard.clear()
            async with asyncio.timeout(SILENCE_MAX_S):
                await self._heard.wait()

    async def _wait_to_retry(self) -> None:
        if self._failure != self._told:  # one line, however long it lasts
            log.warning("pull on %s: %s", self._subject, self._failure)
        self._told = self._failure
        await asyncio.sleep(RETRY_S)

    async def _take(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            self._missing -= 1
            self._told = ""
            await self._on_task(message)
        elif status != _HEARTBEAT and message.subject == f"{self._inbox}.{self._numbers}":
            description = headers.get("Description", "")
            if status != _EXPIRED and description not in _ENDS:
                self._failure = f"{status} {description}"
            self._missing = 0
        self._heard.set()


async def _drain(subscription: Subscription) -> None:
    """Takes messages that were already sent: otherwise they would wait for their redelivery."""
    try:
        async with asyncio.timeout(DRAIN_S):
            await subscription.drain()  # type: ignore[no-untyped-call]
    except (TimeoutError, nats.errors.Error) as error:
        log.info("pull abandoned: %s", error or "NATS does not answer")
