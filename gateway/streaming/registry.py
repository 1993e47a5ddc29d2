"""All live requests of this gateway; the one owner of them.

`open` a stream, `take` what batchers say about it, `leave` when its call ends. Its rows are in the `Dispatch`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gateway.safety.findings import Finding
from gateway.safety.output.windows import Window
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.cascade_state import Cascade
from gateway.streaming.delivery import Reader
from gateway.streaming.dispatch import Dispatch
from gateway.streaming.idempotency import Replay, ReplayCache, check_fingerprint
from gateway.streaming.lifecycle import StreamSpec
from gateway.streaming.stream import Guards, Stream
from sluice.errors import (
    Cancelled,
    DeadlinePassed,
    InternalError,
    InvalidRequest,
    SluiceError,
)
from sluice.internal.v1.frame_pb2 import ROW_END_RETURNED, Frame, FrameBundle, RowTimings
from sluice.internal.v1.gateway_pb2 import KeyRecord
from sluice.v1.inference_pb2 import FinishReason
from sluice.wire.subjects import URGENT_CLASS
from sluice.wire.tokens import VisibleToken

_log = logging.getLogger(__name__)

FRAMES_AT_A_TIME: Final = 4
"""Each wakes a call, which makes text of the tokens and writes it."""

_GONE: Final = Cancelled("the caller has gone")


class Registry:
    """Live streams by request id, by row and by idempotency key, and replays of complete ones.

    Frames of urgent rows are taken at once. The owner takes the others in pieces (`take_more`), so that what a full
    batch brings does not hold up what arrives meanwhile.

    Attributes:
        dispatch: their rows.
    """

    def __init__(self, dispatch: Dispatch, replays: ReplayCache) -> None:
        self.dispatch = dispatch
        dispatch.on_failed = self.row_failed
        self._replays = replays
        self._live: dict[str, Stream] = {}
        self._rows: dict[str, Stream] = {}
        """Every row that was sent for a live stream, also those that it does not need any more."""
        self._by_key: dict[str, Stream] = {}
        self._on_end: dict[str, Callable[[Stream], None]] = {}
        self._later: deque[tuple[str, Frame]] = deque()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._live.values())

    def find(
        self, key: str, fingerprint: bytes, held: Sequence[VisibleToken], model: str, now: float
    ) -> Stream | Replay | None:
        """The live or complete answer that ``key`` names, or None when the request is new.

        Raises:
            IdempotencyConflict: the key belongs to another request.
            InvalidRequest: ``held``, of ``model`` when it is named, are not the beginning of its answer.
        """
        live = self._by_key.get(key)
        found = self._replays.get(key, now) if live is None else live
        if found is None:
            return None
        check_fingerprint(found.fingerprint, fingerprint)
        if not found.matches(held, model):
            raise InvalidRequest.of(
                "resume.token_ids", "are not the beginning of the answer that the key names"
            )
        return found

    def drop_replays(self, tenant: str) -> None:
        """Forgets the complete answers to ``tenant``."""
        self._replays.drop(lambda key: key.partition(" ")[0] == tenant)

    def keep(self, key: str, record: KeyRecord, now: float) -> None:
        """Keeps the complete answer in ``record``: `find` finds it under ``key`` for a while."""
        self._replays.put(key, record, now)

    def live(self, key: str) -> Stream | None:
        """The live answer that ``key`` names."""
        return self._by_key.get(key)

    def open(
        self,
        spec: StreamSpec,
        first: ModelAttempt,
        cascade: Cascade | None = None,
        guards: Guards | None = None,
        on_end: Callable[[Stream], None] | None = None,
    ) -> Stream:
        """Opens a new stream; its key is free (`find` said so).

        ``on_end`` is called once, when the stream has ended and is forgotten.
        """
        stream = Stream(spec, first, self.dispatch, cascade, guards)
        assert stream.request_id not in self._live, "request ids are unique"
        assert spec.key not in self._by_key, "the key is free"
        self._live[stream.request_id] = stream
        self._rows[first.row_id] = stream
        if spec.key:
            self._by_key[spec.key] = stream
        if on_end is not None:
            self._on_end[stream.request_id] = on_end
        return stream

    def join(self, stream: Stream, reader: Reader, model: str = "") -> None:
        """``reader`` reads ``stream`` from now on; the call that read it ends with `Cancelled`.

        What the reader holds is of ``model``.
        """
        previous = stream.delivery.detach()
        if previous is not None and previous is not reader:
            previous.displace(Cancelled("a newer call with the same idempotency key took over"))
        stream.delivery.attach(reader, model)

    def leave(self, stream: Stream, reader: Reader, error: SluiceError = _GONE) -> None:
        """The call of ``reader`` has ended. Without a reader the row is not needed any more: it ends with ``error``."""
        if stream.delivery.reader is reader:
            stream.delivery.detach()
            self.fail(stream, error)

    def stored(self, row_id: str, sequence: int, now: float) -> None:
        """The task of a row is in JetStream."""
        self.dispatch.stored(row_id, sequence, now)
        self.published(row_id)

    def published(self, row_id: str) -> None:
        """A batcher or JetStream has the task of a row."""
        stream = self._rows.get(row_id)
        if stream is not None:
            stream.published(row_id)

    def publish_failed(self, row_id: str, error: SluiceError, now: float) -> None:
        """The task of a row could not be sent, as far as is known."""
        stream = self._rows.get(row_id)
        if stream is not None:
            stream.publish_failed(row_id, error)
            self._update(stream, now)

    def row_failed(self, row_id: str, error: SluiceError, now: float) -> None:
        """A row cannot be answered."""
        stream = self._rows.get(row_id)
        if stream is not None:
            stream.row_failed(row_id, error)
            stream.delivery.wake()
            self._update(stream, now)

    def finish(self, stream: Stream, reason: "FinishReason.ValueType", now: float) -> None:
        """The caller holds the complete answer already: no row is needed."""
        stream.finish(reason, RowTimings(), now)
        self._update(stream, now)

    def fail(self, stream: Stream, error: SluiceError) -> None:
        """Ends a stream with ``error``, unless it ended already."""
        if self._is_live(stream):
            stream.fail(error)
            self._forget(stream)

    def fail_all(self, error: SluiceError) -> None:
        """Ends every live stream with ``error``."""
        for stream in list(self._live.values()):
            self.fail(stream, error)

    def verdict_passed(self, stream: Stream, now: float) -> None:
        """A guard lets the answer of ``stream`` go on."""
        if self._is_live(stream):
            stream.verdict_passed(now)
            self._update(stream, now)

    def settle(
        self,
        stream: Stream,
        attempt: ModelAttempt,
        window: Window,
        findings: Sequence[Finding],
        now: float,
    ) -> None:
        """Token classifiers have read ``window`` of the answer of ``attempt``."""
        if self._is_live(stream):
            stream.settle(attempt, window, findings, now)
            self._update(stream, now)

    def block(self, stream: Stream, rules: tuple[str, ...], now: float) -> None:
        """A guard objects to the answer of ``stream``: it ends with what was delivered of it."""
        if self._is_live(stream):
            stream.block(rules, now)
            self._update(stream, now)

    def reroute(self, stream: Stream, attempt: ModelAttempt, reason: str) -> bool:
        """Another model gives the answer with ``attempt``; False: the stream has ended meanwhile."""
        if not self._is_live(stream):
            return False
        self._rows[attempt.row_id] = stream
        stream.reroute(attempt, reason)
        return True

    def take(self, bundle: FrameBundle, now: float) -> bool:
        """Takes what a batcher says; whether `take_more` has something to do."""
        batcher, dispatch = bundle.batcher, self.dispatch
        dispatch.heard(batcher, now)
        for ref in bundle.held:
            if dispatch.accepts(batcher, ref.request_id, ref.attempt, now, waits=True):
                self.published(ref.request_id)
        dispatch.unknown(batcher, bundle.unknown, now)
        for frame in bundle.frames:
            if self._is_urgent(frame.request_id):
                self._take_frame(batcher, frame, now)
            else:
                self._later.append((batcher, frame))
        return bool(self._later)

    def take_more(self, now: float) -> bool:
        """Takes the next frames of rows that are not urgent; whether there are more."""
        for _ in range(min(FRAMES_AT_A_TIME, len(self._later))):
            self._take_frame(*self._later.popleft(), now)
        return bool(self._later)

    def _is_urgent(self, row_id: str) -> bool:
        """Whether a person waits for the row's stream; its other rows, which only count, keep their order."""
        stream = self._rows.get(row_id)
        return stream is not None and stream.spec.priority_class == URGENT_CLASS

    def _take_frame(self, batcher: str, frame: Frame, now: float) -> None:
        if frame.final.end == ROW_END_RETURNED:
            self.dispatch.returned(batcher, frame, now)
        elif self._is_current(batcher, frame, now):
            self.accept(frame, now)

    def _is_current(self, batcher: str, frame: Frame, now: float) -> bool:
        row_id = frame.request_id
        # Frames of a row that its stream does not need any more still count as usage.
        waits = row_id in self.dispatch
        return self.dispatch.accepts(batcher, row_id, frame.attempt, now) or not waits

    def accept(self, frame: Frame, now: float) -> None:
        """Gives ``frame`` to its stream."""
        stream = self._rows.get(frame.request_id)
        if stream is None:
            return
        try:
            stream.accept(frame, now)
            self._update(stream, now)
        except Exception:  # one bad row must not stop the frames of all others
            _log.exception("request %s: a frame could not be processed", frame.request_id)
            error = InternalError("the answer could not be assembled")
            stream.row_failed(frame.request_id, error)
            self._update(stream, now)

    def tick(self, now: float, *, connected: bool = True) -> None:
        """Ends what is past its deadline, asks about silent rows, evicts old replays.

        ``connected``: whether batchers can be heard.
        """
        for stream in list(self._live.values()):
            if now >= stream.spec.deadline:
                self.fail(
                    stream, DeadlinePassed("the deadline passed before the answer was complete")
                )
        if connected:
            self.dispatch.tick(now)
        else:
            self.dispatch.restart(now)
        self._replays.expire(now)

    def _is_live(self, stream: Stream) -> bool:
        return self._live.get(stream.request_id) is stream

    def _update(self, stream: Stream, now: float) -> None:
        """Registers the row that ``stream`` may have started; forgets it when it has ended."""
        self._rows[stream.attempts[-1].row_id] = stream
        if not stream.ended:
            return
        if stream.finished is not None and stream.spec.key:
            self.keep(stream.spec.key, stream.record(), now)
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        del self._live[stream.request_id]
        for attempt in stream.attempts:
            self._rows.pop(attempt.row_id, None)
        if self._by_key.get(stream.spec.key) is stream:
            del self._by_key[stream.spec.key]
        on_end = self._on_end.pop(stream.request_id, None)
        if on_end is not None:
            self._report_end(stream, on_end)

    def _report_end(self, stream: Stream, on_end: Callable[[Stream], None]) -> None:
        try:
            on_end(stream)
        except Exception:  # what observes one request must not stop the frames of all others
            _log.exception("request %s: its end could not be recorded", stream.request_id)
