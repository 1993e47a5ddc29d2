"""Answers that are kept for equal requests, in each gateway's memory and in a JetStream bucket of all
(docs/concepts/cache.md).

Kept are complete answers that would come out the same again: of greedy requests, and of those that name a seed. Their
names are hashes over all that they depend on: the files and settings of the models, the tokens of the prompt, the
sampling, the text before the safety rules changed it, and the version of their policy. Requests under
a policy with guard models are computed each time: guards decide about, and are recorded for, every request.

Equal requests that run at the same time share one row. The others wait for it, unless it is of a less urgent class or
has failed.
"""

import asyncio
import hashlib
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from gateway.admission.prompts import PreparedPrompt
from gateway.admission.request_context import RequestContext
from gateway.shared.keys import Leader, SingleFlight
from gateway.shared.peers import Peers
from gateway.streaming.answer import Answer
from gateway.streaming.idempotency import REPLAY_BYTES_MAX, Replay, ReplayCache, is_whole
from sluice.background import BackgroundTasks
from sluice.errors import Cancelled, DeadlinePassed, InvalidRequest, SluiceError
from sluice.internal.v1.gateway_pb2 import GatewayAnswer, GatewayQuestion, KeyRecord
from sluice.internal.v1.task_pb2 import Sampling
from sluice.settings import CacheSettings
from sluice.v1.admin_pb2 import ClearAnswersRequest
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_STOP_SEQUENCE,
)
from sluice.wire.bucket import Bucket
from sluice.wire.subjects import RANKS, is_token

ENTRIES_MAX: Final = 65_536
"""Answers in the memory of one gateway; their bytes are bounded too."""
PAUSE_S: Final = 5.0
"""JetStream is not asked for so long after it did not answer, seconds: requests are computed instead."""
STORING_MAX: Final = 256
"""Answers on their way to JetStream; more are kept in memory alone."""
READS_MAX: Final = 64
"""Embeddings of one call that JetStream is asked for; of more texts the memory alone is."""
EVERYONE: Final = "$all"
"""Stands for the tenant when answers go across tenants."""

_WHOLE: Final = frozenset({FINISH_REASON_STOP, FINISH_REASON_LENGTH, FINISH_REASON_STOP_SEQUENCE})
_log = logging.getLogger(__name__)


class AnswerCache:
    """The answers that this gateway keeps.

    Attributes:
        enabled: whether it keeps any.
    """

    def __init__(self, settings: CacheSettings, bucket: Bucket, peers: Peers) -> None:
        self.enabled = settings.enabled
        self._settings = settings
        self._bucket = bucket
        self._peers = peers
        self._memory = ReplayCache(ENTRIES_MAX, settings.max_age_s)
        self._computing = SingleFlight()
        self._storing = BackgroundTasks()
        self._paused_until = 0.0

    def key_of(self, context: RequestContext) -> str:
        """The name of the answer to a request; empty when none is kept."""
        request = context.request
        if not self._keeps(request.tenant):
            return ""
        sampling = request.sampling
        certain = sampling.temperature == 0 or sampling.HasField("seed")
        # A key that the caller named belongs to one request, and its answer is kept under it. Of several answers the
        # first alone is as that of a request for one: the others do not count the prompt.
        own = request.resume or request.key_is_shared or request.answer_index
        policy = context.inspection.compiled
        guarded = policy.guards or policy.answer_readers
        if not certain or own or guarded:
            return ""
        return self._key(request.tenant, context.plan.model, _parts(context))

    async def values_of(
        self,
        tenant: str,
        rows: Sequence[PreparedPrompt],
        compute: Callable[[Sequence[PreparedPrompt]], Awaitable[Sequence[bytes]]],
    ) -> list[bytes]:
        """The embedding of each row: those that are kept are not computed, and equal ones only once."""
        if not self._keeps(tenant):
            return list(await compute(rows))
        keys = [self._key(tenant, row.model.name, _value_parts(row)) for row in rows]
        found = await self.find_values(keys)
        wanted = {key: row for key, row in zip(keys, rows, strict=True) if key not in found}
        computed = await compute(list(wanted.values())) if wanted else ()
        for key, values in zip(wanted, computed, strict=True):
            self._keep(key, KeyRecord(values=values))
            found[key] = values
        return [found[key] for key in keys]

    async def find_values(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The embeddings that are kept under ``keys``."""
        now = time.monotonic()
        found = {key: self._memory.record(key, now) for key in dict.fromkeys(keys)}
        asked = [key for key, record in found.items() if record is None][:READS_MAX]
        found |= dict(zip(asked, await asyncio.gather(*map(self._read, asked)), strict=True))
        return {key: record.values for key, record in found.items() if record is not None}

    async def find(self, context: RequestContext, key: str) -> Replay | None:
        """The answer kept under ``key``. None: the request is computed, and `ended` or `given_up` is called for it.

        Waits while an equal request is computed; the caller limits that.
        """
        rank = RANKS[context.request.priority_class]
        while (kept := self._memory.get(key, time.monotonic())) is None:
            first = self._computing.claim(key, Leader(context.request_id, rank))
            if first is None:
                return await self._lead(key, context.request_id)
            if rank < first.rank or not await asyncio.shield(first.ended):
                return None
        return kept

    def ended(self, key: str, stream: Answer) -> None:
        """The stream of a request that was computed has ended."""
        finished, error = stream.finished, stream.error
        record = None
        degraded = any(one.error is not None for one in stream.attempts)
        if finished is not None and finished.reason in _WHOLE and not degraded:
            record = stream.record()
        if record is not None and record.ByteSize() > REPLAY_BYTES_MAX:
            record = None
        if record is not None:
            self._keep(key, record)
        # The next one computes it when only this caller did not wait for it.
        left = isinstance(error, Cancelled | DeadlinePassed)
        self._computing.release(key, stream.request_id, again=record is not None or left)

    def given_up(self, key: str, request_id: str) -> None:
        """A request that `find` left to be computed has no stream."""
        self._computing.release(key, request_id)

    async def clear(self, request: ClearAnswersRequest) -> list[str]:
        """Forgets answers at all gateways; returns those that did not answer.

        Raises:
            InvalidRequest: the request names no answer that can be.
            TransportUnavailable: JetStream does not answer; nothing is forgotten.
        """
        pattern = _pattern(request)
        if self.enabled:
            await self._bucket.purge(pattern)
        _, silent = await self._peers.ask_all(GatewayQuestion(clear_answers=request))
        return silent

    async def close(self, timeout_s: float) -> None:
        """Returns when everything is stored, or after ``timeout_s`` seconds."""
        await self._storing.settle(timeout_s)

    def _keeps(self, tenant: str) -> bool:
        settings = self._settings
        return self.enabled and (not settings.tenants or tenant in settings.tenants)

    def _key(self, tenant: str, model: str, parts: Iterator[bytes]) -> str:
        scope = EVERYONE if self._settings.across_tenants else tenant
        return f"{scope}.{model}.{hashlib.sha256(b''.join(_sized(parts))).hexdigest()}"

    async def _lead(self, key: str, request_id: str) -> Replay | None:
        """This request computes the answer, unless another gateway has it."""
        try:
            record = await self._read(key)
        except BaseException:
            self.given_up(key, request_id)
            raise
        if record is None:
            return None
        self.given_up(key, request_id)
        return Replay(record)

    async def _read(self, key: str) -> KeyRecord | None:
        if time.monotonic() < self._paused_until:
            return None
        try:
            found = await self._bucket.read(key, KeyRecord)
        except SluiceError as error:
            self._pause(error)
            return None
        if found is None or not (found[0].values or is_whole(found[0])):
            return None
        self._memory.put(key, found[0], time.monotonic())
        return found[0]

    def _keep(self, key: str, record: KeyRecord) -> None:
        self._memory.put(key, record, time.monotonic())
        if len(self._storing) < STORING_MAX and time.monotonic() >= self._paused_until:
            self._storing.spawn(self._write(key, record))

    async def _write(self, key: str, record: KeyRecord) -> None:
        try:
            await self._bucket.write(key, record)
        except SluiceError as error:
            self._pause(error)

    def _pause(self, error: SluiceError) -> None:
        if time.monotonic() >= self._paused_until:
            _log.warning("answers are kept in memory alone for %g s: %s", PAUSE_S, error)
        self._paused_until = time.monotonic() + PAUSE_S

    async def forget(self, request: ClearAnswersRequest) -> GatewayAnswer:
        """Forgets answers in the memory of this gateway."""
        wanted = _pattern(request).split(".")
        self._memory.drop(
            lambda key: all(
                w in ("*", given) for w, given in zip(wanted, key.split("."), strict=True)
            )
        )
        return GatewayAnswer()


def _parts(context: RequestContext) -> Iterator[bytes]:
    """All that the answer depends on."""
    request = context.request
    yield context.inspection.policy.version.encode()
    yield request.sampling.SerializeToString(deterministic=True)
    # All of it as the caller sent it: what an answer restores or hides depends on what the rules have replaced.
    yield repr((request.conversation, request.tools)).encode()
    if request.audio is not None:
        yield hashlib.sha256(request.audio.pcm).digest()
        yield repr((request.audio.language, request.audio.translate)).encode()
    for prepared in (context.first, context.second):
        if prepared is not None:
            sampling = Sampling()
            sampling.CopyFrom(prepared.sampling)
            sampling.ClearField(
                "seed"
            )  # drawn for each request; one that the caller names is in its own sampling
            yield prepared.model.version.encode()
            yield sampling.SerializeToString(deterministic=True)
            yield array("I", prepared.prompt_token_ids).tobytes()


def _value_parts(row: PreparedPrompt) -> Iterator[bytes]:
    """All that an embedding depends on; rules have changed the text before it became tokens."""
    assert row.values is not None, "it is a row for an embedding"
    yield b"embedding"
    yield row.model.version.encode()
    yield row.values.SerializeToString(deterministic=True)
    yield array("I", row.prompt_token_ids).tobytes()


def _sized(parts: Iterator[bytes]) -> Iterator[bytes]:
    """No two lists of parts are the same bytes."""
    for part in parts:
        yield len(part).to_bytes(8, "big")
        yield part


def _pattern(request: ClearAnswersRequest) -> str:
    """The keys to forget, as a pattern of NATS."""
    if request.answer_key:
        parts = request.answer_key.split(".")
        known = len(parts) == 3 and (parts[0] == EVERYONE or is_token(parts[0]))
        if request.tenant or request.model or not (known and all(map(is_token, parts[1:]))):
            raise InvalidRequest.of(
                "answer_key", "must be one that `sluice explain` shows, without tenant and model"
            )
        return request.answer_key
    return f"{request.tenant or '*'}.{request.model or '*'}.*"
