"""The other gateways of the mesh: who they are, and queries to them over core NATS.

Every gateway publishes a heartbeat once a second. One that was silent for `SILENCE_MAX_S` counts as
dead. An id belongs to one process: a gateway that starts checks that nobody has its id.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.message import Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from sluice.background import BackgroundTasks
from sluice.errors import SetupError, SluiceError
from sluice.internal.v1.gateway_pb2 import (
    GatewayHeartbeat,
    GatewayQuery,
    GatewayReply,
    IdentityQuery,
)
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, OversizedMessage, pack, unpack
from sluice.wire.subjects import is_token

M = TypeVar("M", bound=Message)

HEARTBEAT_S: Final = 1.0
"""Interval of heartbeats, in seconds."""
SILENCE_MAX_S: Final = 3.5
"""A gateway without a heartbeat for this long is dead, in seconds: three were lost."""
QUERY_TIMEOUT_S: Final = 0.5
"""How long a gateway may take to reply to a query, in seconds."""
QUERY_TRIES: Final = 2
"""Queries without a reply after which a gateway counts as dead."""
_OMITTED: Final = (), ("minutes", "reserved", "days"), ("rates", "running", "running_bulk")
"""Fields that a heartbeat too large for NATS leaves out, group by group. Buckets have the costs too; of what is
reserved and running other gateways know nothing then.
"""

logger = logging.getLogger(__name__)

QueryHandler = Callable[[Any], Awaitable[GatewayReply]]
"""Replies to one kind of query; its argument is the field of `GatewayQuery` that is set."""


class HeartbeatPart(Protocol):
    """A component that shares state with the other gateways in every heartbeat."""

    def add_to(self, heartbeat: GatewayHeartbeat) -> None:
        """Write this gateway's state into its next heartbeat."""

    def on_heartbeat(self, heartbeat: GatewayHeartbeat) -> None:
        """Take over the state of another gateway."""


class Peers:
    """The gateways beside this one.

    Attributes:
        gateway_id: id of this gateway.
        instance: random name of this process.
        client: connection to NATS, once started.
    """

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.instance = secrets.token_hex(8)
        self._handlers: Mapping[str, QueryHandler] = {}
        self._parts: Sequence[HeartbeatPart] = ()
        self._heartbeats: dict[str, tuple[float, GatewayHeartbeat]] = {}
        """When the latest heartbeat of each gateway came, and the heartbeat, by gateway id."""
        self.client: Client | None = None
        self._replying = BackgroundTasks()
        self._refresh_keys: Callable[[], Awaitable[None]] | None = None

    @property
    def heartbeats(self) -> dict[str, GatewayHeartbeat]:
        """The latest heartbeat of every other gateway that is alive, by gateway id."""
        oldest = time.monotonic() - SILENCE_MAX_S
        self._heartbeats = {
            name: entry for name, entry in self._heartbeats.items() if entry[0] >= oldest
        }
        return {name: heartbeat for name, (_, heartbeat) in sorted(self._heartbeats.items())}

    @property
    def alive(self) -> list[str]:
        """Ids of the other gateways that are alive."""
        return list(self.heartbeats)

    async def start(
        self,
        client: Client,
        handlers: Mapping[str, QueryHandler],
        parts: Sequence[HeartbeatPart],
        refresh_keys: Callable[[], Awaitable[None]],
    ) -> None:
        """Claim the id, subscribe to queries and heartbeats, and announce this gateway.

        Args:
            client: connection to NATS.
            handlers: by the field of `GatewayQuery` that they reply to.
            parts: what is sent and received with heartbeats.
            refresh_keys: reads the API keys again, for `sluice.wire.key_changes`.

        Raises:
            SetupError: another gateway has the id.
        """
        self.client, self._handlers, self._parts = client, handlers, parts
        self._refresh_keys = refresh_keys
        identity = GatewayQuery(identity=IdentityQuery())
        if await self.query(self.gateway_id, identity, tries=1) is not None:
            raise SetupError(
                f"--id: gateway {self.gateway_id!r} is running already; use another id, or none"
            )
        await client.subscribe(subjects.gateway(self.gateway_id), cb=self._on_query)
        await client.subscribe(subjects.GATEWAYS, cb=self._on_heartbeat)
        await self.send_heartbeat()

    async def run(self) -> None:
        """Send heartbeats until it is cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.send_heartbeat()

    async def send_heartbeat(self, *, leaving: bool = False) -> None:
        """Publish the state of this gateway now."""
        heartbeat = GatewayHeartbeat(
            gateway=self.gateway_id, instance=self.instance, leaving=leaving
        )
        for part in self._parts:
            part.add_to(heartbeat)
        for omitted in _OMITTED:
            for field in omitted:
                heartbeat.ClearField(field)
            with suppress(OversizedMessage):  # thousands of tenants
                await self.publish(subjects.GATEWAYS, heartbeat)
                return

    async def query(
        self,
        gateway: str,
        query: GatewayQuery,
        timeout_s: float = QUERY_TIMEOUT_S,
        tries: int = QUERY_TRIES,
    ) -> GatewayReply | None:
        """Send `query` to one gateway; return its reply, or None if it is dead or silent."""
        assert self.client is not None, "started"
        for _ in range(tries):
            try:
                reply = await self.client.request(
                    subjects.gateway(gateway), pack(query), timeout=timeout_s
                )
                return unpack(GatewayReply, reply.data)
            except NoRespondersError:
                break
            except (TimeoutError, NatsError, MalformedMessage) as error:
                logger.warning("no reply from gateway %s: %s", gateway, type(error).__name__)
        return None

    async def query_all(
        self, query: GatewayQuery, timeout_s: float = QUERY_TIMEOUT_S
    ) -> tuple[list[GatewayReply], list[str]]:
        """Send `query` to all gateways.

        Returns:
            The replies, this gateway's first, and the ids of gateways that are alive and gave none, or
            one with a problem. An error of this gateway's own handler is raised.
        """
        # Fixed before this gateway's own part, which may take seconds.
        others = self.alive
        own_reply = await self._handle(query)
        results = await asyncio.gather(*(self.query(name, query, timeout_s, 1) for name in others))
        replies = {
            name: reply
            for name, reply in zip(others, results, strict=True)
            if reply is not None and not reply.problem
        }
        return [own_reply, *replies.values()], [name for name in others if name not in replies]

    async def close(self) -> None:
        """Announce that this gateway leaves."""
        if self.client is not None:
            await self.send_heartbeat(leaving=True)

    async def publish(self, subject: str, message: Message) -> None:
        """Publish a message, or drop it if the client does not take it; raise OversizedMessage if it is too large."""
        assert self.client is not None, "started"
        try:
            await self.client.publish(subject, pack(message))
        except NatsError as error:
            logger.debug("publishing %s failed: %s", type(message).__name__, error)

    async def _on_heartbeat(self, message: Msg) -> None:
        heartbeat = _unpacked(GatewayHeartbeat, message)
        if heartbeat is None:
            return
        if heartbeat.refreshes_keys:
            # Sent by `sluice keys`, which waits until every gateway knows a new or revoked key.
            self._replying.spawn(self._refresh_and_confirm(message.reply))
            return
        if heartbeat.gateway == self.gateway_id or not is_token(heartbeat.gateway):
            return
        # Stop waiting for it at once, instead of after `SILENCE_MAX_S`.
        if heartbeat.leaving:
            self._heartbeats.pop(heartbeat.gateway, None)
            return
        self._heartbeats[heartbeat.gateway] = time.monotonic(), heartbeat
        for part in self._parts:
            part.on_heartbeat(heartbeat)

    async def _on_query(self, message: Msg) -> None:
        query = _unpacked(GatewayQuery, message)
        if query is not None:
            # A task, because some replies take seconds and others must not wait for them.
            self._replying.spawn(self._reply(query, message.reply))

    async def _refresh_and_confirm(self, reply_to: str) -> None:
        """Read the API keys again, then confirm it with a heartbeat.

        Without one the sender (`sluice.wire.key_changes`) reports this gateway, which it knows from the `peers` of the
        others.
        """
        assert self._refresh_keys is not None, "started"
        try:
            await self._refresh_keys()
        except SluiceError as error:
            logger.warning("reading changed API keys failed: %s", error)
            return
        heartbeat = GatewayHeartbeat(
            gateway=self.gateway_id, instance=self.instance, peers=self.alive
        )
        await self.publish(reply_to, heartbeat)

    async def _handle(self, query: GatewayQuery) -> GatewayReply:
        kind = query.WhichOneof("query") or ""
        if kind == "identity":
            return GatewayReply()
        handler = self._handlers.get(kind)
        if handler is None:
            return GatewayReply(problem="unknown query")
        return await handler(getattr(query, kind))

    async def _reply(self, query: GatewayQuery, reply_to: str) -> None:
        try:
            reply = await self._handle(query)
        except SluiceError as error:
            reply = GatewayReply(problem=error.message)
        except Exception:  # the task would end silently, and the sender would wait
            logger.exception("query of another gateway failed")
            reply = GatewayReply(problem="internal error; see the log of the gateway")
        await self.publish(reply_to, reply)


def _unpacked(kind: type[M], message: Msg) -> M | None:
    try:
        return unpack(kind, message.data)
    except MalformedMessage as error:
        logger.error("dropped malformed %s: %s", kind.__name__, error)
        return None
