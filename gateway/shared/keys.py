"""Idempotency keys that callers name, shared by all gateways: one gateway answers a key at a time.

1. Before it admits a request, a gateway writes its name under the key: a *claim*.
2. When the stream has ended, it replaces the claim with the complete answer, or removes it.
3. A gateway that finds the claim of another asks it to hand the key over. The other one ends its
   own call, or has stored the answer by then. If it does not respond, its claim is replaced.
4. Every write names the revision that it replaces. So one of two gateways wins, and a late write
   of a gateway that was taken for dead has no effect.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from gateway.shared.peers import Peers
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.idempotency import REPLAY_BYTES_MAX, check_fingerprint, is_whole
from gateway.streaming.registry import Registry
from gateway.validation.requests import ValidRequest
from sluice.errors import Cancelled, SluiceError, TransportUnavailable
from sluice.internal.v1 import gateway_pb2
from sluice.wire.bucket import Bucket

STORE_WAIT_S: Final = 1.0
"""Longest wait of a caller for its answer to be stored for the other gateways, in seconds."""
CLAIM_TRIES: Final = 5
"""Attempts to claim a key that other gateways claim at the same time."""
CLAIM_GRACE_S: Final = 30.0
"""How long a claim outlives the deadline of its request, in seconds; a dead gateway frees no key."""

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Leader:
    """The request that computes what a key names, while equal requests wait for it.

    Attributes:
        fingerprint: hash of the request that the key belongs to.
        ended: resolves when the leader has ended. True: look for its result again, or become the
            leader. False: the result is not shared, compute another one.
    """

    request_id: str
    fingerprint: bytes = b""
    ended: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SingleFlight:
    """Lets one request at a time compute what a key names."""

    def __init__(self) -> None:
        self._leaders: dict[str, Leader] = {}

    def claim(self, key: str, candidate: Leader) -> Leader | None:
        """Make `candidate` the leader of `key` until `release`, or return the present leader."""
        leader = self._leaders.setdefault(key, candidate)
        return None if leader is candidate else leader

    def release(self, key: str, request_id: str, *, again: bool = True) -> None:
        """End the leadership of that request and wake those that wait; see `Leader.ended`."""
        leader = self._leaders.get(key)
        if leader is not None and leader.request_id == request_id:
            del self._leaders[key]
            leader.ended.set_result(again)


class SharedKeys:
    """The keys that this gateway answers now.

    Args:
        keep_s: how long complete answers are stored, in seconds; below 1 they are not.
    """

    def __init__(self, registry: Registry, bucket: Bucket, peers: Peers, keep_s: float) -> None:
        self._registry = registry
        self._bucket = bucket
        self._peers = peers
        self._keep_s = keep_s
        self._claims: dict[str, int] = {}
        """Revision of this gateway's claim by key; 0 while it is being written."""
        self._starting = SingleFlight()
        self._storing: dict[str, asyncio.Task[None]] = {}

    async def run_once(
        self,
        request: ValidRequest,
        request_id: str,
        find: Callable[[], _Result | None],
        start: Callable[[], Awaitable[_Result]],
    ) -> _Result:
        """Return the answer that the key of `request` has, or start one; one call at a time.

        A key that other gateways may get is claimed first. The claim lasts until `on_end`, or until
        `start` fails.

        Args:
            request: a request with a key.
            request_id: its id.
            find: looks in this gateway for a live or complete answer.
            start: admits the request and opens its answer.

        Raises:
            IdempotencyConflict: the key belongs to another request.
            TransportUnavailable: JetStream does not respond, so the owner of the key is unknown; or
                other gateways claim it at the same time.
            Cancelled: another gateway took the key over while it was claimed.
        """
        while (answer := find()) is None:
            leader = self._starting.claim(
                request.key, Leader(request_id, fingerprint=request.fingerprint)
            )
            if leader is None:
                try:
                    return await self._start(request, find, start)
                finally:
                    self._starting.release(request.key, request_id)
            check_fingerprint(leader.fingerprint, request.fingerprint)
            await asyncio.shield(leader.ended)
        return answer

    async def _start(
        self,
        request: ValidRequest,
        find: Callable[[], _Result | None],
        start: Callable[[], Awaitable[_Result]],
    ) -> _Result:
        if not request.key_is_shared:
            return await start()
        try:
            await self._claim(request.key, request.fingerprint, request.timeout_s + CLAIM_GRACE_S)
            return find() or await start()
        except BaseException:
            self._release(request.key, None)
            raise

    def check_claim(self, key: str) -> None:
        """Raise Cancelled if another gateway has taken `key` over since this one claimed it."""
        if key not in self._claims:
            raise _taken_over()

    def on_end(self, key: str, stream: AnswerStream) -> None:
        """Store the answer of a stream that has ended, or free its key, in the background."""
        if key not in self._claims:
            return
        record = None
        if stream.finished is not None and self._keep_s >= 1:
            record = stream.record()
            record.gateway = self._peers.gateway_id
        self._release(key, record)

    async def wait_stored(self, key: str) -> None:
        """Return once the answer of `key` is stored, or after `STORE_WAIT_S`."""
        if (storing := self._storing.get(key)) is not None:
            await asyncio.wait([storing], timeout=STORE_WAIT_S)

    async def close(self) -> None:
        """Return once everything is stored, or after `STORE_WAIT_S`."""
        if self._storing:
            await asyncio.wait(self._storing.values(), timeout=STORE_WAIT_S)

    async def _claim(self, key: str, fingerprint: bytes, ttl_s: float) -> None:
        """Write this gateway's name under `key`, or take over the answer that is stored there."""
        name, own_id, revision = _record_name(key), self._peers.gateway_id, 0
        self._claims[key] = 0
        for _ in range(CLAIM_TRIES):
            claim = gateway_pb2.KeyRecord(fingerprint=fingerprint, gateway=own_id)
            written = await self._bucket.write(name, claim, revision, ttl_s)
            if written is not None:
                # Another gateway may have asked for the key while it was written.
                self.check_claim(key)
                self._claims[key] = written
                return
            record, revision = await self._bucket.read(name, gateway_pb2.KeyRecord) or (None, 0)
            # The claim has expired or was removed meanwhile: claim it again.
            if record is None:
                continue
            check_fingerprint(record.fingerprint, fingerprint)
            if is_whole(record):
                self._registry.replays.put(key, record, time.monotonic())
                self._claims.pop(key, None)
                return
            # A claim in this gateway's own name dates from before its last start.
            if record.gateway != own_id and not record.HasField("answer"):
                query = gateway_pb2.HandOverQuery(key=key)
                await self._peers.query(record.gateway, gateway_pb2.GatewayQuery(hand_over=query))
        raise TransportUnavailable(
            "idempotency_key: other gateways receive requests with the same key; send it to one"
        )

    def _release(self, key: str, record: gateway_pb2.KeyRecord | None) -> None:
        """Replace this gateway's claim by `record`, or remove it, in the background."""
        revision = self._claims.pop(key, None)
        # Another gateway took the key over, or the claim was never written.
        if not revision:
            return
        task = asyncio.ensure_future(self._store(key, record, revision))
        self._storing[key] = task
        # A second task of the same key may be dropped here: a reader that comes too early retries.
        task.add_done_callback(lambda _: self._storing.pop(key, None))

    async def _store(self, key: str, record: gateway_pb2.KeyRecord | None, revision: int) -> None:
        try:
            if record is not None and record.ByteSize() <= REPLAY_BYTES_MAX:
                await self._bucket.write(_record_name(key), record, revision, self._keep_s)
            else:
                await self._bucket.remove(revision)
        except SluiceError as error:
            # A gateway that gets the key next queries this one, and computes the answer again.
            logger.warning("storing the record of an idempotency key failed: %s", error)

    async def hand_over(self, query: gateway_pb2.HandOverQuery) -> gateway_pb2.GatewayReply:
        """End the call with this key: another gateway has a newer one and replaces the claim."""
        await self.wait_stored(query.key)
        self._claims.pop(query.key, None)
        stream = self._registry.by_key.get(query.key)
        if stream is not None:
            stream.fail(_taken_over())
        return gateway_pb2.GatewayReply()


def _taken_over() -> Cancelled:
    return Cancelled("a newer call with the same idempotency key took over at another gateway")


def _record_name(key: str) -> str:
    """Return the name of `key` in the bucket, where few characters are allowed: tenant and hash."""
    return f"{key.partition(' ')[0]}.{hashlib.sha256(key.encode()).hexdigest()}"
