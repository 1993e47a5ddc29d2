"""All live requests of this gateway; the one owner of them.

Small loop: `open` a stream, `take` frames for it, `leave` when its call ends. What the batchers must hear goes to the
`Outbox`.
"""

import logging
from collections.abc import Iterator, Sequence

from gateway.streaming.leg import Leg
from gateway.streaming.outbox import NOTHING, Outbox, Reaction, refused
from gateway.streaming.reader import Reader
from gateway.streaming.replays import Replays
from gateway.streaming.stream import Stream
from sluice.errors import (
    Cancelled,
    DeadlinePassed,
    IdempotencyConflict,
    InternalError,
    InvalidRequest,
    SluiceError,
)
from sluice.internal.v1.control_pb2 import HeldTokensResponse
from sluice.internal.v1.frame_pb2 import Frame

_log = logging.getLogger(__name__)


class Registry:
    """Live streams by request id and by idempotency key, and finished ones for replays."""

    def __init__(self, outbox: Outbox, replays: Replays) -> None:
        self._outbox = outbox
        self._replays = replays
        self._live: dict[str, Stream] = {}
        self._rows: dict[str, Stream] = {}
        """Every row that was sent for a live stream, also those that it needs no more."""
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
        assert stream.request_id not in self._live, "request ids are unique"
        assert stream.ticket.key not in self._by_key, "the key is free"
        self._live[stream.request_id] = stream
        self._rows[stream.row_id] = stream
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
        self.fail(stream, Cancelled("the caller has gone"))

    def stand_by(self, stream: Stream, now: float) -> None:
        """``stream`` has begun: so does the row of a second model, where its cascade wants that."""
        self._follow(stream, stream.stand_by(now), now)

    def unpublished(self, stream: Stream, row_id: str, error: SluiceError, now: float) -> None:
        """The task of a row of ``stream`` could not be stored, as far as is known."""
        if self._is_live(stream):
            self._follow(stream, stream.unpublished(row_id, error), now)

    def fail(self, stream: Stream, error: SluiceError) -> None:
        """Ends a stream for a reason of this gateway, unless it ended already."""
        if self._is_live(stream):
            self._abandon(stream, error)

    def released(self, stream: Stream, now: float) -> None:
        """A verdict of a guard came that lets the answer of ``stream`` go on."""
        if self._is_live(stream):
            stream.released(now)
            self._follow(stream, NOTHING, now)

    def block(self, stream: Stream, rules: tuple[str, ...], now: float) -> None:
        """A guard objects to the answer of ``stream``: it ends with what a caller has of it."""
        if self._is_live(stream):
            self._follow(stream, stream.block(rules, now), now)

    def reroute(self, stream: Stream, leg: Leg, reason: str) -> bool:
        """Another model answers with ``leg``; False: the stream has ended meanwhile."""
        if not self._is_live(stream):
            return False
        self._rows[leg.row_id] = stream
        self._outbox.tell(stream.reroute(leg, reason) + stream.dismissals())
        return True

    def fail_all(self, error: SluiceError) -> None:
        """Ends every live stream with ``error``."""
        for stream in list(self._live.values()):
            self._abandon(stream, error)

    def take(self, frame: Frame, now: float) -> None:
        """Gives ``frame`` to its stream; nobody waiting for it is an answer too."""
        stream = self._rows.get(frame.request_id)
        if stream is None:
            self._outbox.tell(refused(frame))
            return
        try:
            reaction = stream.take(frame, now)
        except Exception:  # one bad row must not stop the frames of all others
            _log.exception("request %s: frame could not be taken", frame.request_id)
            error = InternalError("the answer could not be assembled")
            reaction = stream.spoil(frame.request_id, error)
        self._follow(stream, reaction, now)

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
            else:
                self._outbox.tell(stream.overdue(now))
        self._replays.expire(now)

    def resync(self, now: float) -> None:
        """Frames were lost on the way to this gateway: asks for those of every live stream."""
        for stream in self._live.values():
            self._outbox.tell(stream.resync(now))

    def held(self, row_id: str) -> HeldTokensResponse:
        """What this gateway has of a row, for a batcher that got its task again."""
        stream = self._rows.get(row_id)
        leg = None if stream is None else stream.held(row_id)
        if leg is None:
            return HeldTokensResponse(waiting=False)
        return HeldTokensResponse(
            waiting=True, token_ids=leg.transcript.token_ids, attempt=leg.assembler.attempt
        )

    def _is_live(self, stream: Stream) -> bool:
        return self._live.get(stream.request_id) is stream

    def _abandon(self, stream: Stream, error: SluiceError) -> None:
        self._outbox.tell(stream.abandon(error) + stream.dismissals())
        self._forget(stream)
        self._report(stream)

    def _follow(self, stream: Stream, reaction: Reaction, now: float) -> None:
        """Does what follows from something that ``stream`` took in."""
        self._outbox.tell(reaction)
        self._outbox.tell(stream.dismissals())
        if reaction.began:
            self._rows[reaction.began] = stream
        if stream.ended:
            self.close(stream, now)

    def _report(self, stream: Stream) -> None:
        if stream.ticket.on_end is not None:
            stream.ticket.on_end(stream)

    def _forget(self, stream: Stream) -> None:
        self._live.pop(stream.request_id, None)
        for leg in stream.legs:
            self._rows.pop(leg.row_id, None)
        if self._by_key.get(stream.ticket.key) is stream:
            del self._by_key[stream.ticket.key]
