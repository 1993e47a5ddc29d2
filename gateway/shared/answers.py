"""Cached answers to equal requests, in the memory of each gateway.

Cached are complete answers that would come out the same again: of greedy requests, and of requests
that name a seed (docs/concepts/cache.md). The key is a hash over everything that the answer depends
on: files and settings of the models, tokens of the prompt, sampling, the text before redaction, and
the version of the safety policy. Requests under a policy with guard models are always computed,
because guards decide about every request and are recorded with it.

Equal requests that run at the same time share one run. The others wait for it, unless it has a less
urgent class or has failed.
"""

import asyncio
import hashlib
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from gateway.admission.request_context import PreparedPrompt, RequestContext
from gateway.shared.keys import Leader, SingleFlight
from gateway.shared.peers import Peers
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.idempotency import REPLAY_BYTES_MAX, Replay, ReplayCache
from sluice.errors import Cancelled, DeadlinePassed, InvalidRequest
from sluice.internal.v1.gateway_pb2 import GatewayQuery, GatewayReply, KeyRecord
from sluice.internal.v1.task_pb2 import Sampling
from sluice.settings import CacheSettings
from sluice.v1.admin_pb2 import ClearAnswersRequest
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_STOP_SEQUENCE,
)
from sluice.wire.subjects import RANKS, is_token

ENTRIES_MAX: Final = 65_536
"""Answers in the memory of one gateway; their bytes are bounded too."""
_WHOLE: Final = frozenset({FINISH_REASON_STOP, FINISH_REASON_LENGTH, FINISH_REASON_STOP_SEQUENCE})


class AnswerCache:
    """The cached answers of this gateway.

    Attributes:
        enabled: whether answers are cached at all.
    """

    def __init__(self, settings: CacheSettings, peers: Peers) -> None:
        self.enabled = settings.enabled
        self._tenants = settings.tenants
        self._peers = peers
        self._memory = ReplayCache(ENTRIES_MAX, settings.max_age_s)
        self._computing = SingleFlight()

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
        policy = context.inspection.compiled
        guarded = policy.guards or policy.answer_readers
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
        """Return the embedding of each prompt; cached ones are not computed, and equal ones only once."""
        if not self._caches_for(tenant):
            return list(await compute(prompts))
        keys = [self._key(tenant, prompt.model.name, _value_parts(prompt)) for prompt in prompts]
        now = time.monotonic()
        records = {key: self._memory.record(key, now) for key in keys}
        cached = {key: record.values for key, record in records.items() if record is not None}
        # Equal prompts have equal keys, so each is computed once.
        missing = {
            key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in cached
        }
        computed = await compute(list(missing.values())) if missing else ()
        for key, values in zip(missing, computed, strict=True):
            self._memory.put(key, KeyRecord(values=values), time.monotonic())
            cached[key] = values
        return [cached[key] for key in keys]

    async def find(self, context: RequestContext, key: str) -> Replay | None:
        """Return the cached answer under `key`, waiting while an equal request computes it.

        Returns:
            None if the caller must compute the answer, and then call `on_end` or `abandon`.
        """
        rank = RANKS[context.request.priority_class]
        while (answer := self._memory.get(key, time.monotonic())) is None:
            leader = self._computing.claim(key, Leader(context.request_id, rank))
            if leader is None:
                return None
            # An urgent request must not wait for a less urgent one, nor for one that failed.
            if rank < leader.rank or not await asyncio.shield(leader.ended):
                return None
        return answer

    def on_end(self, key: str, stream: AnswerStream) -> None:
        """Cache the answer of a stream that has ended, and wake the requests that wait for it."""
        finished, error = stream.finished, stream.error
        record = None
        degraded = any(run.error is not None for run in stream.runs)
        # An answer that a limit, a rule or a fallback changed is not that of the next request.
        if finished is not None and finished.reason in _WHOLE and not degraded:
            record = stream.record()
        if record is not None and record.ByteSize() > REPLAY_BYTES_MAX:
            record = None
        if record is not None:
            self._memory.put(key, record, time.monotonic())
        # The next one computes it when only this caller did not wait for it.
        abandoned = isinstance(error, Cancelled | DeadlinePassed)
        self._computing.release(key, stream.request_id, again=record is not None or abandoned)

    def abandon(self, key: str, request_id: str) -> None:
        """Release the key of a request that opens no stream."""
        self._computing.release(key, request_id)

    async def clear(self, request: ClearAnswersRequest) -> list[str]:
        """Drop answers at all gateways; return the gateways that did not reply.

        Raises:
            InvalidRequest: the request names no possible answer.
        """
        _, silent = await self._peers.query_all(GatewayQuery(clear_answers=request))
        return silent

    def _caches_for(self, tenant: str) -> bool:
        return self.enabled and (not self._tenants or tenant in self._tenants)

    def _key(self, tenant: str, model: str, parts: Iterator[bytes]) -> str:
        return f"{tenant}.{model}.{hashlib.sha256(b''.join(_sized(parts))).hexdigest()}"

    async def forget(self, request: ClearAnswersRequest) -> GatewayReply:
        """Drop answers in the memory of this gateway."""
        parts = _parts_of(request)
        self._memory.drop(
            lambda key: all(
                pattern in ("*", part) for pattern, part in zip(parts, key.split("."), strict=True)
            )
        )
        return GatewayReply()


def _parts(context: RequestContext) -> Iterator[bytes]:
    """Yield everything that the answer depends on."""
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
            yield (prepared.model.version + prepared.model.weights).encode()
            yield sampling.SerializeToString(deterministic=True)
            yield array("I", prepared.prompt_token_ids).tobytes()


def _value_parts(prompt: PreparedPrompt) -> Iterator[bytes]:
    """Yield everything that an embedding depends on; its text became tokens after redaction."""
    assert prompt.values is not None, "a prompt for an embedding"
    yield b"embedding"
    yield (prompt.model.version + prompt.model.weights).encode()
    yield prompt.values.SerializeToString(deterministic=True)
    yield array("I", prompt.prompt_token_ids).tobytes()


def _sized(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield `parts` with their lengths, so that no two lists give the same bytes."""
    for part in parts:
        yield len(part).to_bytes(8, "big")
        yield part


def _parts_of(request: ClearAnswersRequest) -> list[str]:
    """Return tenant, model and hash of the keys to drop, "*" for any."""
    if not request.answer_key:
        parts = [request.tenant or "*", request.model or "*", "*"]
        named = [name for name in (request.tenant, request.model) if name]
    else:
        parts = named = request.answer_key.split(".")
    if len(parts) != 3 or not all(map(is_token, named)):
        raise InvalidRequest.of(
            "answer_key", "must be a key that `sluice explain` shows, without tenant and model"
        )
    if request.answer_key and (request.tenant or request.model):
        raise InvalidRequest.of("answer_key", "names the answer; leave out tenant and model")
    return parts
