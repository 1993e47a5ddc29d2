"""One request that waits for its answer: frames go in, events come out.

Which model works on it is the business of its `Relay`, what callers may see that of its `Showing`; the stream itself
is how it stands, how it ends, and who reads.
"""

from collections.abc import Sequence
from typing import Final

from gateway.streams.assembler import Taken
from gateway.streams.endings import contradiction, error_of, finish_reason_of, timings_of
from gateway.streams.leg import Leg
from gateway.streams.outbox import Reaction
from gateway.streams.reader import Reader
from gateway.streams.relay import Relay
from gateway.streams.showing import Showing
from gateway.streams.states import LEGAL_MOVES, StreamState
from gateway.streams.ticket import Ticket
from gateway.streams.transcript import Transcript
from sluice.errors import SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.frame_pb2 import Frame, RowTimings
from sluice.v1.inference_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_STOP_SEQUENCE,
    NOTICE_KIND_RECOVERED,
    Finished,
    FinishReason,
    GenerateResponse,
    LegUsage,
    Notice,
    Started,
)

_ENDED: Final = frozenset({StreamState.FINISHED, StreamState.FAILED})


class Stream:
    """The state of one answer and of the call that reads it.

    Attributes:
        ticket: what was fixed at admission.
        state: where it stands (`StreamState`).
        error: why it failed, in state FAILED.
        finished: how it ended, in state FINISHED.
        first_frame_at: when the first frame came, seconds.
        first_token_at: when there was something to show for the first time, seconds.
    """

    def __init__(self, ticket: Ticket, leg: Leg) -> None:
        self.ticket = ticket
        self.state = StreamState.PUBLISHING
        self.error: SluiceError | None = None
        self.finished: Finished | None = None
        self.first_frame_at: float | None = None
        self.first_token_at: float | None = None
        self._relay = Relay(leg, ticket.cascade)
        self._showing = Showing(ticket.with_logprobs)
        self._awaited: tuple[FinishReason.ValueType, RowTimings] | None = None
        """How the answer ends if no guard objects, in state CHECKING."""

    @property
    def request_id(self) -> str:
        """The name of the request."""
        return self.ticket.started.request_id

    @property
    def legs(self) -> Sequence[Leg]:
        """The models that worked on it, in order; the last one does now."""
        return self._relay.legs

    @property
    def leg(self) -> Leg:
        """The model that works on it now."""
        return self._relay.leg

    @property
    def row_id(self) -> str:
        """The name of the row on the wires."""
        return self.leg.row_id

    @property
    def transcript(self) -> Transcript:
        """What came of the leg."""
        return self.leg.transcript

    @property
    def attempt(self) -> int:
        """The highest attempt seen."""
        return self.leg.assembler.attempt

    @property
    def ended(self) -> bool:
        """Whether nothing will be added."""
        return self.state in _ENDED

    @property
    def row_ended(self) -> bool:
        """Whether no row computes for it."""
        return self.ended or self.state is StreamState.CHECKING

    @property
    def reader(self) -> Reader | None:
        """The call that reads, or None when it has gone."""
        return self._showing.reader

    @property
    def holding(self) -> bool:
        """Whether nothing is shown before the commit point of a cascade."""
        return self._relay.holding

    @property
    def silent(self) -> bool:
        """Whether nothing of the answer may be shown yet."""
        guards = self.ticket.guards
        return self.holding or (guards is not None and guards.checks.holds)

    def attach(self, reader: Reader, model: str = "") -> None:
        """``reader`` reads from now on; what it holds is of ``model``, or of the present one when that is empty."""
        self._showing.attach(reader, self.transcript, anew=self._relay.left(model))

    def detach(self) -> Reader | None:
        """Nobody reads any more; returns the call that did."""
        return self._showing.detach()

    def holds_beginning(self, token_ids: Sequence[int], model: str = "") -> bool:
        """Whether ``token_ids`` of ``model`` are the beginning of the answer, as far as a caller can know it."""
        return self._relay.left(model) or self.transcript.starts_with(token_ids)

    def started(self, model: str = "") -> Started:
        """The first event for a caller who holds a part of ``model``, or nothing."""
        started = Started()
        started.CopyFrom(self.ticket.started)
        if not self._relay.left(model):
            started.model = self.leg.model
            started.prompt_tokens = self.leg.prompt_tokens
        return started

    def read(self, reader: Reader) -> list[GenerateResponse]:
        """The events that ``reader`` has not had, everything that waits in one delta.

        Raises:
            SluiceError: the stream ended with it, or another call took over.
        """
        if reader.displaced_by is not None:
            raise reader.displaced_by
        if self.error is not None:
            raise self.error
        return self._showing.events(reader, self.transcript, self.finished, silent=self.silent)

    def published(self) -> None:
        """JetStream has the task."""
        if self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)

    def take(self, frame: Frame, now: float) -> Reaction:
        """Adds what ``frame`` brings."""
        if self.state is StreamState.CHECKING:  # said again: the row has ended
            return Reaction(confirm=frame.HasField("final"))
        before = len(self.transcript.shown_ids)
        taken = self.leg.take(frame, now)
        self._note_progress(taken, now)
        if self._in_doubt(taken, now):
            ended = taken.final is not None
            return Reaction(confirm=ended, cancel=not ended, hand_over=True)
        reaction = self._conclude(taken, now)
        if self.ticket.guards is not None and not self.row_ended and not self.holding:
            self.ticket.guards.produced(self, ended=False)
        if not self.row_ended and self._reader_fell_behind(before):
            return Reaction(cancel=True)
        return reaction

    def overdue(self, now: float) -> int | None:
        """The index to ask for when nothing came for too long, else None."""
        if self.state in (StreamState.PUBLISHING, StreamState.CHECKING):
            return None
        return self.leg.assembler.overdue(now)

    def resync(self, now: float) -> int:
        """The index to ask for after frames were lost on the way."""
        return self.leg.assembler.ask_now(now)

    def hand_over(self, now: float) -> None:
        """The second model begins; what the first one said is void."""
        assert self.ticket.cascade is not None, "only a cascade is handed over"
        self._go_over(self._relay.second(now))
        self.ticket.cascade.launch(self)

    def reroute(self, leg: Leg, reason: str) -> None:
        """A governed model answers with ``leg``; its task must still be sent."""
        self.leg.handed_over = reason
        self.stay()
        self._go_over(leg)

    def stay(self) -> None:
        """No second model answers, whatever the first one says."""
        self._relay.stay()

    def released(self, now: float) -> None:
        """A verdict came that lets the answer go on: shows and ends what waited for it alone."""
        guards = self.ticket.guards
        assert guards is not None, "it came from them"
        if self._awaited is not None and not guards.checks.waits:
            self._finish(*self._awaited, now)
        elif not self.silent and self.reader is not None:
            self._note_shown(now)
            self._showing.release(self.transcript)

    def block(self, rules: tuple[str, ...], now: float) -> None:
        """Guards end the answer: what has been given to a caller stays, nothing else is shown."""
        self._showing.withhold(rules)
        self.transcript.close(truncated=True)
        row = RowTimings() if self._awaited is None else self._awaited[1]
        self._finish(FINISH_REASON_CONTENT_FILTER, row, now)

    def fail(self, error: SluiceError) -> None:
        """Ends with ``error``."""
        self.error = error
        self._move(StreamState.FAILED)
        self._showing.wake()

    def finish(self, reason: "FinishReason.ValueType", timings: RowTimings, now: float) -> None:
        """Ends with the answer complete, or with an error when it is not what the caller holds."""
        reason = self.leg.close(reason)
        if self.transcript.contradicted:
            self.fail(contradiction())
            return
        guards = self.ticket.guards
        if guards is not None:
            guards.produced(self, ended=True)
            if guards.checks.waits:
                self._awaited = reason, timings
                self._move(StreamState.CHECKING)
                self._showing.wake()
                return
        self._finish(reason, timings, now)

    def _finish(self, reason: "FinishReason.ValueType", timings: RowTimings, now: float) -> None:
        if not self._showing.withheld_by:
            self._note_shown(now)
        self.finished = self._finished_event(reason, timings, now)
        self._move(StreamState.FINISHED)
        self._showing.wake()

    def _finished_event(
        self, reason: "FinishReason.ValueType", row: RowTimings, now: float
    ) -> Finished:
        first_at = now if self.first_token_at is None else self.first_token_at
        withheld_by = self._showing.withheld_by
        return Finished(
            reason=reason,
            usage=self.leg.usage,
            timings=timings_of(self.ticket.hops, row, first_at, now),
            stop=("" if withheld_by else self.transcript.stop) or "",
            rules=withheld_by or self.transcript.blocked,
            model=self.leg.model,
            legs=[LegUsage(model=leg.model, usage=leg.usage) for leg in self.legs],
        )

    def _note_shown(self, now: float) -> None:
        if self.first_token_at is None and self.transcript.shown_ids:
            self.first_token_at = now

    def _go_over(self, leg: Leg) -> None:
        notice, self._awaited = self._relay.go_over(leg), None
        if self.ticket.guards is not None:
            self.ticket.guards.restart()
        self._move(StreamState.PUBLISHING)
        self._showing.begin_anew(notice)

    def _note_progress(self, taken: Taken, now: float) -> None:
        if self.first_frame_at is None:
            self.first_frame_at = now
        if taken.token_ids and self.first_token_at is None and not self.silent:
            self.first_token_at = now
        if taken.recovered:
            message = "another process continues the answer at the same token"
            self._showing.notify(Notice(kind=NOTICE_KIND_RECOVERED, message=message))
        if self.state is not StreamState.STREAMING and taken.token_ids:
            self._move(StreamState.STREAMING)

    def _in_doubt(self, taken: Taken, now: float) -> bool:
        watched = self._relay.watched
        doubt = self._relay.in_doubt(taken, now)
        if watched and not self._relay.watched:
            self.first_token_at = self.first_token_at or now
        return doubt

    def _conclude(self, taken: Taken, now: float) -> Reaction:
        final = taken.final
        confirm = final is not None and final.end != frame_pb2.ROW_END_CANCELLED
        if self.leg.stopped:
            row = RowTimings() if final is None else final.timings
            self.finish(FINISH_REASON_STOP_SEQUENCE, row, now)
            return Reaction(confirm=confirm, cancel=final is None)
        if self.transcript.contradicted:
            self.fail(contradiction())
            return Reaction(confirm=confirm, cancel=final is None)
        if final is None:
            return Reaction(resend_from=taken.resend_from)
        reason = finish_reason_of(final.end)
        if reason is None:
            self.fail(error_of(final))
        else:
            self.finish(reason, final.timings, now)
        return Reaction(confirm=confirm)

    def _reader_fell_behind(self, before: int) -> bool:
        """Wakes the reader; ends the stream when more waits for it than it may have unread."""
        error = None if self.silent else self._showing.grew(before, self.transcript)
        if error is not None:
            self.fail(error)
        return error is not None

    def _move(self, target: StreamState) -> None:
        assert target in LEGAL_MOVES[self.state], f"{self.state.name} to {target.name}"
        self.state = target
