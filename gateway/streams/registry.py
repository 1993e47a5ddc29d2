"""All live requests of this gateway; the one owner of them.

Small loop: `open` a stream, `take` frames for it, `leave` when its call ends. What the batchers must hear goes to the
`Outbox`.
"""

import logging
from collections.abc import Iterator, Sequence

from gateway.streams.leg import Leg
from gateway.streams.outbox import Outbox
from gateway.streams.reader import Reader
from gateway.streams.replays import Replays
from gateway.streams.stream import Stream
from sluice.errors import (
    Cancelled,
    DeadlinePassed,
    IdempotencyConflict,
    InternalError,
    InvalidRequest,
    SluiceError,
)
from sluice.internal.v1.control_pb2 import HeldTokensResponse
from sluice.internal.v1.frame_pb2 import ROW_END_CANCELLED, Frame

_log = logging.getLogger(__name__)


class Registry:
    """Live streams by request id and by idempotency key, and finished ones for replays."""

    def __init__(self, outbox: Outbox, replays: Replays) -> None:
        self._outbox = outbox
        self._replays = replays
        self._live: dict[str, Stream] = {}
        self._by_key: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._live.values())

    def find(
        self, key: str, fingerprint: bytes, held: Sequence[int], model: str, now: float
    ) -> Stream | None:
        """The live or finished stream that ``key`` names, or None when the request is new.

        Raises:
            IdempotencyConflict: the key belongs to another request.
            InvalidRequest: ``held``, of ``model`` when it is named, are not the beginning of its answer.
        """
        if not key:
            return None
        stream = self._by_key.get(key) or self._replays.get(key, now)
        if stream is None:
            return None
        if stream.ticket.fingerprint != fingerprint:
            raise IdempotencyConflict(
                "the idempotency key was used with another request; use a new key for a new request"
            )
        if not stream.holds_beginning(held, model):
            raise InvalidRequest.of(
                "resume.token_ids", "are not the beginning of the answer that the key names"
            )
        return stream

    def open(self, stream: Stream) -> None:
        """Adds a new stream; its key is free (`find` said so)."""
        assert stream.row_id not in self._live, "request ids are unique"
        assert stream.ticket.key not in self._by_key, "the key is free"
        self._live[stream.row_id] = stream
        if stream.ticket.key:
            self._by_key[stream.ticket.key] = stream

    def join(self, stream: Stream, reader: Reader, model: str = "") -> None:
        """``reader`` reads ``stream`` from now on; the call that read it ends with `Cancelled`.

        What the reader holds is of ``model``.
        """
        previous = stream.detach()
        if previous is not None and previous is not reader:
            previous.displaced_by = Cancelled(
                "a newer call with the same idempotency key took over"
            )
            previous.wake()
        stream.attach(reader, model)

    def leave(self, stream: Stream, reader: Reader) -> None:
        """The call of ``reader`` has ended. Without a reader nobody wants the row any more."""
        if stream.reader is not reader:
            return
        stream.detach()
        if self._live.get(stream.row_id) is stream:
            self._abandon(stream, Cancelled("the caller has gone"))

    def fail(self, stream: Stream, error: SluiceError) -> None:
        """Ends a stream for a reason of this gateway, unless it ended already."""
        if self._live.get(stream.row_id) is stream:
            self._abandon(stream, error)

    def released(self, stream: Stream, now: float) -> None:
        """A verdict of a guard came that lets the answer of ``stream`` go on."""
        if self._live.get(stream.row_id) is stream:
            stream.released(now)
            if stream.ended:
                self.close(stream, now)

    def block(self, stream: Stream, rules: tuple[str, ...], now: float) -> None:
        """A guard objects to the answer of ``stream``: it ends with what a caller has of it."""
        if self._live.get(stream.row_id) is stream:
            self._stop_row(stream)
            stream.block(rules, now)
            self.close(stream, now)

    def reroute(self, stream: Stream, leg: Leg, reason: str) -> bool:
        """Another model answers with ``leg``; False: the stream has ended meanwhile."""
        if self._live.get(stream.row_id) is not stream:
            return False
        self._stop_row(stream)
        del self._live[stream.row_id]
        stream.reroute(leg, reason)
        self._live[stream.row_id] = stream
        return True

    def fail_all(self, error: SluiceError) -> None:
        """Ends every live stream with ``error``."""
        for stream in list(self._live.values()):
            self._abandon(stream, error)

    def take(self, frame: Frame, now: float) -> None:
        """Gives ``frame`` to its stream; nobody waiting for it is an answer too."""
        stream = self._live.get(frame.request_id)
        if stream is None:
            self._refuse(frame)
            return
        try:
            reaction = stream.take(frame, now)
        except Exception:  # one bad row must not stop the frames of all others
            _log.exception("request %s: frame could not be taken", frame.request_id)
            self._abandon(stream, InternalError("the answer could not be assembled"))
            return
        if reaction.resend_from is not None:
            self._outbox.resend(frame.request_id, reaction.resend_from)
        if reaction.confirm:
            self._outbox.confirm(frame.request_id)
        if reaction.cancel:
            self._outbox.cancel(frame.request_id)
        if reaction.hand_over:
            del self._live[frame.request_id]
            stream.hand_over(now)
            self._live[stream.row_id] = stream
        if stream.ended:
            self.close(stream, now)

    def close(self, stream: Stream, now: float) -> None:
        """Forgets a stream that has ended; a finished one with a key can be replayed."""
        assert stream.ended, "only what has ended is closed"
        self._forget(stream)
        if stream.finished is not None and stream.ticket.key:
            self._replays.put(stream, now)
        self._report(stream)

    def tick(self, now: float) -> None:
        """Ends what is past its deadline, asks about what is silent, forgets old replays."""
        for stream in list(self._live.values()):
            if now >= stream.ticket.deadline:
                self._abandon(
                    stream, DeadlinePassed("the deadline passed before the answer was complete")
                )
            elif (index := stream.overdue(now)) is not None:
                self._outbox.resend(stream.row_id, index)
        self._replays.expire(now)

    def resync(self, now: float) -> None:
        """Frames were lost on the way to this gateway: asks for those of every live stream."""
        for stream in self._live.values():
            if not stream.row_ended:
                self._outbox.resend(stream.row_id, stream.resync(now))

    def held(self, request_id: str) -> HeldTokensResponse:
        """What this gateway has of a request, for a batcher that got its task again."""
        stream = self._live.get(request_id)
        if stream is None or stream.row_ended:
            return HeldTokensResponse(waiting=False)
        return HeldTokensResponse(
            waiting=True, token_ids=stream.transcript.token_ids, attempt=stream.attempt
        )

    def _refuse(self, frame: Frame) -> None:
        """Ends what the caller gave up before the batcher had the task: that cancel found no row."""
        if not frame.HasField("final"):
            self._outbox.cancel(frame.request_id)
        elif frame.final.end != ROW_END_CANCELLED:
            self._outbox.confirm(frame.request_id)

    def _stop_row(self, stream: Stream) -> None:
        if not stream.row_ended:
            self._outbox.cancel(stream.row_id)

    def _abandon(self, stream: Stream, error: SluiceError) -> None:
        self._outbox.cancel(stream.row_id)
        self._forget(stream)
        if not stream.ended:
            stream.fail(error)
        self._report(stream)

    def _report(self, stream: Stream) -> None:
        if stream.ticket.on_end is not None:
            stream.ticket.on_end(stream)

    def _forget(self, stream: Stream) -> None:
        self._live.pop(stream.row_id, None)
        if self._by_key.get(stream.ticket.key) is stream:
            del self._by_key[stream.ticket.key]
