"""Cached answers to equal requests, in the memory of each gateway and in a JetStream bucket of all.

Cached are complete answers that would come out the same again: of greedy requests, and of requests
that name a seed (docs/concepts/cache.md). The key is a hash over everything that the answer depends
on: files and settings of the models, tokens of the prompt, sampling, the text before redaction, and
the version of the safety policy. Requests under a policy with guard models are always computed,
because guards decide about every request and are recorded with it.

Equal requests of one class that run at the same time share one run: the others wait for it, unless
it has failed.
"""

import asyncio
import hashlib
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from gateway.admission.request_context import PreparedPrompt, RequestContext
from gateway.shared.keys import Leader, SingleFlight
from gateway.shared.peers import Peers
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.idempotency import REPLAY_BYTES_MAX, Replay, ReplayCache, is_whole
from sluice.background import BackgroundTasks
from sluice.errors import Cancelled, DeadlinePassed, InvalidRequest, SluiceError
from sluice.internal.v1.gateway_pb2 import GatewayQuery, GatewayReply, KeyRecord
from sluice.internal.v1.task_pb2 import Sampling
from sluice.settings import CacheSettings
from sluice.v1.admin_pb2 import ClearAnswersRequest
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_STOP_SEQUENCE,
)
from sluice.wire import subjects
from sluice.wire.bucket import Bucket
from sluice.wire.subjects import is_token

ENTRIES_MAX: Final = 65_536
"""Answers in the memory of one gateway; their bytes are bounded too."""
PAUSE_S: Final = 5.0
"""How long JetStream is left alone after it failed, in seconds; meanwhile requests are computed."""
STORING_MAX: Final = 256
"""Answers on their way to JetStream at the same time; others stay in memory alone."""
READS_MAX: Final = 64
"""Embeddings of one call that are looked up in JetStream; the rest is looked up in memory alone."""

_WHOLE: Final = frozenset({FINISH_REASON_STOP, FINISH_REASON_LENGTH, FINISH_REASON_STOP_SEQUENCE})
logger = logging.getLogger(__name__)


class SharedAnswerCache:
    """The cached answers of this gateway.

    Attributes:
        enabled: whether answers are cached at all.
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
        """Return the cache key of a request, or "" if its answer is not cached."""
        request = context.request
        if not self._caches_for(request.tenant):
            return ""
        sampling = request.sampling
        is_repeatable = sampling.temperature == 0 or sampling.HasField("seed")
        # A key that the caller named belongs to one request, and its answer is kept under it. Of several answers the
        # first alone is as that of a request for one: the others do not count the prompt.
        is_private = request.resume or request.key_is_shared or request.answer_index
        guarded = context.safety.guards or context.safety.answer_readers
        # Guards decide about every request, so an earlier verdict is not reused.
        if not is_repeatable or is_private or guarded:
            return ""
        return self._key(request.tenant, context.plan.model, _parts(context))

    async def embeddings_of(
        self,
        tenant: str,
        prompts: Sequence[PreparedPrompt],
        compute: Callable[[Sequence[PreparedPrompt]], Awaitable[Sequence[bytes]]],
    ) -> list[bytes]:
        """Return the embedding of each prompt.

        If the cache is on for `tenant`, cached ones are not computed, and equal ones only once.
        """
        if not self._caches_for(tenant):
            return list(await compute(prompts))
        keys = [self._key(tenant, prompt.model.name, _value_parts(prompt)) for prompt in prompts]
        cached = await self.find_embeddings(keys)
        # Equal prompts have equal keys, so each is computed once.
        missing = {
            key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in cached
        }
        computed = await compute(list(missing.values())) if missing else ()
        for key, values in zip(missing, computed, strict=True):
            self._cache(key, KeyRecord(values=values))
            cached[key] = values
        return [cached[key] for key in keys]

    async def find_embeddings(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the embeddings that are cached under `keys`."""
        now = time.monotonic()
        records = {key: self._memory.record(key, now) for key in dict.fromkeys(keys)}
        missing = [key for key, record in records.items() if record is None][:READS_MAX]
        records |= dict(zip(missing, await asyncio.gather(*map(self._read, missing)), strict=True))
        return {key: record.values for key, record in records.items() if record is not None}

    async def find(self, context: RequestContext, key: str) -> Replay | None:
        """Return the cached answer under `key`, waiting while an equal request computes it.

        Returns:
            None if the caller must compute the answer, and then call `on_end` or `abandon`.
        """
        run = _run_of(key, context.request.priority_class)
        while (answer := self._memory.get(key, time.monotonic())) is None:
            leader = self._computing.claim(run, Leader(context.request_id))
            if leader is None:
                try:
                    # Another gateway may have computed it.
                    record = await self._read(key)
                except BaseException:
                    self.abandon(key, context)
                    raise
                if record is None:
                    return None
                self.abandon(key, context)
                return Replay(record)
            # The result of that request is not shared, see `Leader.ended`.
            if not await asyncio.shield(leader.ended):
                return None
        return answer

    def on_end(self, key: str, stream: AnswerStream) -> None:
        """Cache the answer of a stream that has ended, and wake the requests that wait for it."""
        finished, error = stream.finished, stream.error
        # The next one computes it when only this caller did not wait for it.
        again = isinstance(error, Cancelled | DeadlinePassed)
        degraded = any(run.error is not None for run in stream.runs)
        # An answer that a limit, a rule or a fallback changed is not that of the next request.
        if finished is not None and finished.reason in _WHOLE and not degraded:
            record = stream.record()
            if record.ByteSize() <= REPLAY_BYTES_MAX:
                self._cache(key, record)
                again = True
        run = _run_of(key, stream.current.run_class.priority_class)
        self._computing.release(run, stream.request_id, again=again)

    def abandon(self, key: str, context: RequestContext) -> None:
        """Release the key of a request that opens no stream."""
        self._computing.release(_run_of(key, context.request.priority_class), context.request_id)

    async def clear(self, request: ClearAnswersRequest) -> list[str]:
        """Drop answers at all gateways; return the gateways that did not reply.

        Raises:
            InvalidRequest: the request names no possible answer.
            TransportUnavailable: JetStream does not respond; nothing is dropped.
        """
        pattern = _pattern(request)
        if self.enabled:
            await self._bucket.purge(pattern)
        _, silent = await self._peers.query_all(GatewayQuery(clear_answers=request))
        return silent

    async def close(self, timeout_s: float) -> None:
        """Return once everything is stored, or after `timeout_s` seconds."""
        await self._storing.settle(timeout_s)

    def _caches_for(self, tenant: str) -> bool:
        settings = self._settings
        return self.enabled and (not settings.tenants or tenant in settings.tenants)

    def _key(self, tenant: str, model: str, parts: Iterator[bytes]) -> str:
        return f"{tenant}.{model}.{hashlib.sha256(b''.join(_sized(parts))).hexdigest()}"

    async def _read(self, key: str) -> KeyRecord | None:
        if time.monotonic() < self._paused_until:
            return None
        try:
            stored = await self._bucket.read(key, KeyRecord)
        except SluiceError as error:
            self._pause(error)
            return None
        if stored is None or not (stored[0].values or is_whole(stored[0])):
            return None
        self._memory.put(key, stored[0], time.monotonic())
        return stored[0]

    def _cache(self, key: str, record: KeyRecord) -> None:
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
            logger.warning("answer cache is in memory only for %g s: %s", PAUSE_S, error)
        self._paused_until = time.monotonic() + PAUSE_S

    async def forget(self, request: ClearAnswersRequest) -> GatewayReply:
        """Drop answers in the memory of this gateway."""
        pattern = _pattern(request)
        self._memory.drop(lambda key: subjects.covers(pattern, key))
        return GatewayReply()


def _run_of(key: str, priority_class: str) -> str:
    """Return the name of the run that computes an answer: the classes of requests have one each."""
    return f"{priority_class} {key}"


def _parts(context: RequestContext) -> Iterator[bytes]:
    """Yield everything that the answer depends on."""
    request = context.request
    yield context.safety.version.encode()
    yield request.sampling.SerializeToString(deterministic=True)
    # All of it as the caller sent it: what an answer restores or hides depends on what the rules have replaced.
    yield repr((request.conversation, request.tools)).encode()
    if request.audio is not None:
        yield hashlib.sha256(request.audio.pcm).digest()
        yield repr((request.audio.language, request.audio.translate)).encode()
    for prepared in context.prompts:
        sampling = Sampling()
        sampling.CopyFrom(prepared.sampling)
        # Drawn for each request; one that the caller names is in its own sampling.
        sampling.ClearField("seed")
        yield prepared.model.version.encode()
        yield sampling.SerializeToString(deterministic=True)
        yield array("I", prepared.prompt_token_ids).tobytes()


def _value_parts(prompt: PreparedPrompt) -> Iterator[bytes]:
    """Yield everything that an embedding depends on; its text became tokens after redaction."""
    assert prompt.values is not None, "a prompt for an embedding"
    yield b"embedding"
    yield prompt.model.version.encode()
    yield prompt.values.SerializeToString(deterministic=True)
    yield array("I", prompt.prompt_token_ids).tobytes()


def _sized(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield `parts` with their lengths, so that no two lists give the same bytes."""
    for part in parts:
        yield len(part).to_bytes(8, "big")
        yield part


def _pattern(request: ClearAnswersRequest) -> str:
    """Return the NATS pattern of the keys to drop."""
    if request.answer_key:
        parts = request.answer_key.split(".")
        is_key = len(parts) == 3 and all(map(is_token, parts))
        if request.tenant or request.model or not is_key:
            raise InvalidRequest.of(
                "answer_key", "must be a key that `sluice explain` shows, without tenant and model"
            )
        return request.answer_key
    return f"{request.tenant or '*'}.{request.model or '*'}.*"
