"""Idempotency keys that callers named, shared by all gateways: one gateway answers a key at a time.

A gateway writes its name under the key before it admits the request, and the complete answer when the stream has ended.
One that finds another's name asks that gateway for the key: it ends its own call, or has stored the answer by then. A
gateway that is gone is not waited for. Every write names the revision it replaces, so of two gateways one wins, and the
late write of a gateway that was thought gone has no effect.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from gateway.shared.peers import Peers
from gateway.streaming.answer import Answer
from gateway.streaming.idempotency import REPLAY_BYTES_MAX, check_fingerprint, is_whole
from gateway.streaming.registry import Registry
from gateway.validation.requests import ValidRequest
from sluice.errors import RETRY_AFTER_S, Cancelled, SluiceError, TransportUnavailable
from sluice.internal.v1 import gateway_pb2
from sluice.wire.bucket import Bucket

STORED_S: Final = 1.0
"""How long the end of an answer waits until it is stored for the other gateways, seconds."""
TRIES: Final = 5
"""Writes of a key that other gateways write as well."""
GRACE_S: Final = 30.0
"""A key whose gateway is gone is free this long after the deadline of its request, seconds."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Leader:
    """The request that works on what a key names; others that want the same wait until it has ended."""

    request_id: str
    rank: int = 0
    """Of its class."""
    fingerprint: bytes = b""
    ended: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Whether to look again: there is a result, or another request must work. False: it is for that request alone."""


class SingleFlight:
    """What a key names is worked on by one request at a time."""

    def __init__(self) -> None:
        self._leaders: dict[str, Leader] = {}

    def claim(self, key: str, leader: Leader) -> Leader | None:
        """Who works on ``key`` already. None: ``leader`` does, until `release`."""
        first = self._leaders.setdefault(key, leader)
        return None if first is leader else first

    def release(self, key: str, request_id: str, *, again: bool = True) -> None:
        """That request does not work on ``key`` any more; ``again``: see `Leader.ended`."""
        leader = self._leaders.get(key)
        if leader is not None and leader.request_id == request_id:
            del self._leaders[key]
            leader.ended.set_result(again)


class SharedKeys:
    """The keys that this gateway answers now.

    Args:
        keep_s: how long complete answers are kept; below 1: they are not.
    """

    def __init__(self, registry: Registry, bucket: Bucket, peers: Peers, keep_s: float) -> None:
        self._registry = registry
        self._bucket = bucket
        self._peers = peers
        self._keep_s = keep_s
        self._claims: dict[str, int] = {}
        """Revisions of this gateway's records, by key; 0 while the first one is written."""
        self._beginning = SingleFlight()
        self._storing: dict[str, asyncio.Task[None]] = {}

    async def once(
        self,
        request: ValidRequest,
        request_id: str,
        find: Callable[[], _T | None],
        begin: Callable[[], Awaitable[_T]],
    ) -> _T:
        """What ``find`` finds under the key of ``request``, or else what ``begin`` makes, for one call at a time.

        Where other gateways may get the key, this one alone answers it until `ended`, or until ``begin`` fails.

        Raises:
            IdempotencyConflict: the key belongs to another request.
            TransportUnavailable: JetStream does not answer, so it is not known who has the key.
        """
        while (found := find()) is None:
            first = self._beginning.claim(
                request.key, Leader(request_id, fingerprint=request.fingerprint)
            )
            if first is None:
                try:
                    return await self._begin(request, find, begin)
                finally:
                    self._beginning.release(request.key, request_id)
            check_fingerprint(first.fingerprint, request.fingerprint)
            await asyncio.shield(first.ended)
        return found

    async def _begin(
        self,
        request: ValidRequest,
        find: Callable[[], _T | None],
        begin: Callable[[], Awaitable[_T]],
    ) -> _T:
        if not request.key_is_shared:
            return await begin()
        try:
            await self._claim(request.key, request.fingerprint, request.timeout_s + GRACE_S)
            return find() or await begin()
        except BaseException:
            self._release(request.key, None)
            raise

    def check(self, key: str) -> None:
        """Raises Cancelled when ``key`` was claimed by this gateway, and another one has asked for it since."""
        if key not in self._claims:
            raise _taken_over()

    def ended(self, key: str, stream: Answer) -> None:
        """The stream of ``key`` has ended: its answer is for all gateways, or the key is free."""
        if key not in self._claims:
            return
        record = None
        if stream.finished is not None and self._keep_s >= 1:
            record = stream.record()
            record.gateway = self._peers.gateway_id
        self._release(key, record)

    async def stored(self, key: str) -> None:
        """Returns when what `ended` writes is stored, or after `STORED_S`."""
        if (storing := self._storing.get(key)) is not None:
            await asyncio.wait([storing], timeout=STORED_S)

    async def close(self) -> None:
        """Returns when everything is written, or after `STORED_S`."""
        if self._storing:
            await asyncio.wait(self._storing.values(), timeout=STORED_S)

    async def _claim(self, key: str, fingerprint: bytes, ttl_s: float) -> None:
        name, me, last = _name(key), self._peers.gateway_id, 0
        self._claims[key] = 0
        for _ in range(TRIES):
            record = gateway_pb2.KeyRecord(fingerprint=fingerprint, gateway=me)
            revision = await self._bucket.write(name, record, last, ttl_s)
            if revision is not None:
                self.check(key)
                self._claims[key] = revision
                return
            found, last = await self._bucket.read(name, gateway_pb2.KeyRecord) or (None, 0)
            if found is None:
                continue
            check_fingerprint(found.fingerprint, fingerprint)
            if is_whole(found):
                self._registry.replays.put(key, found, time.monotonic())
                self._claims.pop(key, None)
                return
            # A record in its own name is from before its last start.
            if found.gateway != me and not found.HasField("answer"):
                question = gateway_pb2.HandOverQuestion(key=key)
                await self._peers.ask(
                    found.gateway, gateway_pb2.GatewayQuestion(hand_over=question)
                )
        raise TransportUnavailable(
            "other gateways get requests with the same idempotency key",
            retry_after_s=RETRY_AFTER_S,
        )

    def _release(self, key: str, record: gateway_pb2.KeyRecord | None) -> None:
        """Writes ``record`` over this gateway's claim, or removes the claim, in the background."""
        revision = self._claims.pop(key, None)
        if not revision:
            return
        task = asyncio.ensure_future(self._store(key, record, revision))
        self._storing[key] = task
        # Of two of one key the second is not waited for after the first: who reads too early asks again.
        task.add_done_callback(lambda _: self._storing.pop(key, None))

    async def _store(self, key: str, record: gateway_pb2.KeyRecord | None, revision: int) -> None:
        try:
            if record is not None and record.ByteSize() <= REPLAY_BYTES_MAX:
                await self._bucket.write(_name(key), record, revision, self._keep_s)
            else:
                await self._bucket.remove(revision)
        except SluiceError as error:
            # Another gateway that gets the key asks this one, and answers it again.
            _log.warning("an idempotency key was not stored: %s", error)

    async def hand_over(self, asked: gateway_pb2.HandOverQuestion) -> gateway_pb2.GatewayAnswer:
        """Another gateway got a newer call with a key of ours, and replaces our record: ends the older call."""
        await self.stored(asked.key)
        self._claims.pop(asked.key, None)
        stream = self._registry.live(asked.key)
        if stream is not None:
            stream.fail(_taken_over())
        return gateway_pb2.GatewayAnswer()


def _taken_over() -> Cancelled:
    return Cancelled("a newer call with the same idempotency key took over at another gateway")


def _name(key: str) -> str:
    """The name of ``key`` in the bucket, which takes few characters: the tenant, and a hash."""
    return f"{key.partition(' ')[0]}.{hashlib.sha256(key.encode()).hexdigest()}"
