"""Idempotency keys: complete answers that a repeated request gets again.

A complete answer is kept as the bytes of a `KeyRecord`: what a caller may see of it, and nothing of the call that
computed it. The same bytes are in the memory of the gateway that answered and, for keys that a caller named, in a
JetStream bucket that all gateways share (`gateway.shared.keys`).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final

from gateway.identity.resume_token import ResumeToken
from gateway.streaming.transcript import VisibleText
from sluice.errors import IdempotencyConflict, SluiceError
from sluice.internal.v1.gateway_pb2 import KeyRecord, StoredAnswer
from sluice.v1 import inference_pb2 as pb
from sluice.wire.tokens import VisibleToken, tokens_of

_REPLAYED: Final = pb.Notice(
    kind=pb.NOTICE_KIND_REPLAYED,
    message="the answer to an earlier request with this idempotency key",
)
REPLAY_BYTES_MAX: Final = 256 * 1024
"""Largest answer that is kept, in bytes; a repeated request for a larger one is computed again."""
REPLAYS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Size of all answers that one `ReplayCache` keeps, in bytes; the oldest are evicted."""


class Replay(VisibleText):
    """A complete answer.

    Attributes:
        fingerprint: of the request that it answers.
        finished: its last event.
        request_id: of the request that it answers.
    """

    def __init__(self, record: KeyRecord) -> None:
        """Replay the answer in `record`, which `is_whole`."""
        assert record.HasField("answer"), "only complete answers are replayed"
        self.fingerprint = record.fingerprint
        self._stored: StoredAnswer = record.answer
        self._index = self._notices = 0
        """Tokens and notices that the call that reads has."""
        self.finished, self.request_id = record.answer.finished, record.answer.started.request_id
        whole = record.answer.delta
        ends = (0, *accumulate(record.answer.text_lengths))
        self.visible_ids, self.logprobs = tokens_of(whole), whole.logprobs
        self.texts = [whole.text[start:end] for start, end in pairwise(ends)]
        self.tail = whole.text[ends[-1] :]

    def join(self, held_tokens: int, *_: object, model: str = "") -> int:
        """Let the one call read that has this replay; see `AnswerStream.join`."""
        self._index, self._notices = held_tokens, len(self._stored.notices)
        if self._replaced(model):
            self._index, self._notices = 0, self._stored.restart_notice
        return 0

    def leave(self, reader: int, error: SluiceError) -> None:
        """Do nothing: the end of a call changes nothing."""

    def started(self, _: int, model: str) -> pb.Started:
        """Return the first event for a reader that has tokens of `model`; empty: it has none."""
        started = pb.Started()
        started.CopyFrom(self._stored.started)
        for replaced in self._stored.replaced:
            if replaced.model == model:
                started.model, started.prompt_tokens = replaced.model, replaced.prompt_tokens
        return started

    def answer_to(self, started: pb.Started, timings: pb.Timings, token: ResumeToken) -> "Replay":
        """Return the same answer to another request, for which nothing is computed.

        Args:
            started: its first event, as if the model were asked; the one that answered stays.
            timings: of its own hops.
            token: the resume token of the answer to it.
        """
        record = KeyRecord()
        record.answer.CopyFrom(self._stored)
        answer, stored = record.answer, self._stored.started
        for field in ("notices", "restart_notice", "replaced"):
            answer.ClearField(field)
        answer.started.CopyFrom(started)
        answer.started.model, answer.started.seed = stored.model, stored.seed
        answer.started.prompt_tokens = stored.prompt_tokens
        answer.delta.resume_token = token.after(self.visible_ids)
        answer.finished.timings.CopyFrom(timings)
        answer.finished.usage.cached = True
        answer.finished.ClearField("attempts")
        return Replay(record)

    def matches(self, held_ids: Sequence[VisibleToken], model: str) -> bool:
        """Return whether a caller's tokens of `model` begin the answer; those of a replaced model always match."""
        return self._replaced(model) or self.visible_ids[: len(held_ids)] == tuple(held_ids)

    def read(self, _: int) -> pb.GenerateResponse:
        """Return all events after the first one."""
        stored = self._stored
        notices = stored.notices[self._notices :]
        if not stored.finished.usage.cached:
            notices = [_REPLAYED, *notices]
        delta = self.delta(self._index, bool(self.logprobs), with_tail=True)
        if delta is not None and delta.token_ids:
            delta.resume_token = stored.delta.resume_token
        return pb.GenerateResponse(notices=notices, delta=delta, finished=stored.finished)

    def _replaced(self, model: str) -> bool:
        return any(replaced.model == model for replaced in self._stored.replaced)


def is_whole(record: KeyRecord) -> bool:
    """Return whether a record has an answer that can be replayed: every token has its text."""
    answer = record.answer
    return record.HasField("answer") and len(answer.text_lengths) == len(tokens_of(answer.delta))


class ReplayCache:
    """Complete answers by key in the memory of one gateway, bounded in number, bytes and age; the oldest go first."""

    def __init__(self, entries: int, keep_s: float, bytes_max: int = REPLAYS_BYTES_MAX) -> None:
        self._limit = entries
        self._keep_s = keep_s
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        """With the time at which each expires."""

    def put(self, key: str, record: KeyRecord, now: float) -> None:
        """Keep the answer in `record` under `key`, unless it is too large."""
        packed = record.SerializeToString()
        if len(packed) > REPLAY_BYTES_MAX:
            return
        self._remove(key)
        self._entries[key] = packed, now + self._keep_s
        self._bytes += len(packed)
        while len(self._entries) > self._limit or self._bytes > self._bytes_max:
            self._remove(next(iter(self._entries)))

    def get(self, key: str, now: float) -> Replay | None:
        """Return the answer kept under `key`, or None."""
        record = self.record(key, now)
        return None if record is None else Replay(record)

    def record(self, key: str, now: float) -> KeyRecord | None:
        """Return the record kept under `key`, or None."""
        packed, expires_at = self._entries.get(key, (b"", 0.0))
        return KeyRecord.FromString(packed) if expires_at > now else None

    def drop(self, matches: Callable[[str], bool]) -> None:
        """Evict the answers whose key `matches`."""
        for key in [key for key in self._entries if matches(key)]:
            self._remove(key)

    def expire(self, now: float) -> None:
        """Evict what is too old. All are kept equally long, so the oldest entry expires first."""
        while self._entries and next(iter(self._entries.values()))[1] <= now:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: str) -> None:
        packed, _ = self._entries.pop(key, (b"", 0.0))
        self._bytes -= len(packed)


def check_fingerprint(stored: bytes, fingerprint: bytes) -> None:
    """Raise IdempotencyConflict if a key was used with another request."""
    if stored != fingerprint:
        raise IdempotencyConflict(
            "the idempotency key was used with another request; use a new key for a new request"
        )
