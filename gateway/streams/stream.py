"""One request that waits for its answer: frames go in, events come out.

Which model works on it is the business of its `Relay`, what callers may see that of its `Showing`; the stream itself
is how it stands, how it ends, and who reads.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.streams.assembler import Taken
from gateway.streams.endings import contradiction, error_of, finish_reason_of, timings_of
from gateway.streams.leg import Leg
from gateway.streams.outbox import NOTHING, Reaction, dismissed, refused
from gateway.streams.reader import Reader
from gateway.streams.relay import ENDED, REROUTED, Relay
from gateway.streams.showing import Showing
from gateway.streams.states import LEGAL_MOVES, StreamState
from gateway.streams.ticket import Cascade, Ticket
from gateway.streams.transcript import Transcript
from sluice.errors import SluiceError
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
        """The models that worked on it, in the order in which they began."""
        return self._relay.legs

    @property
    def leg(self) -> Leg:
        """The model whose answer it is now."""
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

    def held(self, row_id: str) -> Leg | None:
        """The leg of a row that computes for the answer; None when nobody waits for the row."""
        standby = self._relay.stands_by(row_id)
        if standby is not None:
            return None if standby.over else standby.leg
        return self.leg if row_id == self.row_id and not self.row_ended else None

    def stand_by(self, now: float) -> Reaction:
        """The second model's row begins too, where the cascade wants it at once."""
        leg = self._relay.stand_by(now)
        if leg is None:
            return NOTHING
        self._cascade.launch(self, leg)
        return Reaction(began=leg.row_id)

    def published(self, row_id: str = "") -> None:
        """JetStream has the task of the row, or of the answer's."""
        standby = self._relay.stands_by(row_id)
        if standby is not None:
            standby.published = True
        elif row_id in ("", self.row_id) and self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)

    def unpublished(self, row_id: str, error: SluiceError) -> Reaction:
        """JetStream did not say that it has the task of the row. It may all the same: frames are proof."""
        standby = self._relay.stands_by(row_id)
        if standby is not None:
            if not standby.leg.assembler.heard:
                self._relay.lose(error)
            return NOTHING
        if row_id == self.row_id and self.state is StreamState.PUBLISHING:
            return self.abandon(error)
        return NOTHING

    def take(self, frame: Frame, now: float) -> Reaction:
        """Adds what ``frame`` brings."""
        if frame.request_id != self.row_id:
            return self._take_aside(frame, now)
        if self.state is StreamState.CHECKING:  # said again: the row has ended
            return refused(frame) if frame.HasField("final") else NOTHING
        # That something waited to be shown is not the reader's fault.
        first, before = self.leg, 0 if self.silent else len(self.transcript.shown_ids)
        taken = first.take(frame, now)
        self._note_progress(taken, now)
        if self._relay.in_doubt(taken, now):
            return dismissed(first.row_id, first.final) + self._hand_over(now)
        if taken.token_ids and self.first_token_at is None and not self.silent:
            self.first_token_at = now
        reaction = self._conclude(taken.resend_from, now)
        self._ask_guards()
        if not self.row_ended and self._reader_fell_behind(before):
            return dismissed(first.row_id, None)
        return reaction

    def spoil(self, row_id: str, error: SluiceError) -> Reaction:
        """A frame of the row could not be taken: without the row there is no answer, unless it only stood by."""
        if self._relay.stands_by(row_id) is not None:
            self._relay.lose(error)
            return NOTHING
        return self.abandon(error) if row_id == self.row_id else NOTHING

    def dismissals(self) -> Reaction:
        """What batchers must be told of a row that ran beside the answer's and is not needed any more."""
        return self._relay.dismissals()

    def overdue(self, now: float) -> Reaction:
        """Asks for what should have come long ago."""
        asked = ((leg.row_id, leg.assembler.overdue(now)) for leg in self._computing())
        resends = tuple((row_id, index) for row_id, index in asked if index is not None)
        return Reaction(resends=resends) if resends else NOTHING

    def resync(self, now: float) -> Reaction:
        """Asks for all that comes next, after frames were lost on the way."""
        return Reaction(
            resends=tuple((leg.row_id, leg.assembler.ask_now(now)) for leg in self._computing())
        )

    def reroute(self, leg: Leg, reason: str) -> Reaction:
        """A governed model answers with ``leg``; its task must still be sent."""
        reaction = NOTHING if self.row_ended else dismissed(self.row_id, None)
        self.leg.handed_over = reason
        self.stay()
        self._go_over(leg)
        return reaction

    def stay(self) -> None:
        """No second model answers, whatever the first one says."""
        self._relay.stay(REROUTED)

    def released(self, now: float) -> None:
        """A verdict came that lets the answer go on: shows and ends what waited for it alone."""
        guards = self.ticket.guards
        assert guards is not None, "it came from them"
        if self._awaited is not None and not guards.checks.waits:
            self._finish(*self._awaited, now)
        elif not self.silent and self.reader is not None:
            self._note_shown(now)
            self._showing.release(self.transcript)

    def block(self, rules: tuple[str, ...], now: float) -> Reaction:
        """Guards end the answer: what has been given to a caller stays, nothing else is shown."""
        reaction = NOTHING if self.row_ended else dismissed(self.row_id, None)
        self._relay.stay(ENDED)
        self._showing.withhold(rules)
        self.transcript.close(truncated=True)
        row = RowTimings() if self._awaited is None else self._awaited[1]
        self._finish(FINISH_REASON_CONTENT_FILTER, row, now)
        return reaction

    def abandon(self, error: SluiceError) -> Reaction:
        """Ends with ``error``, unless it has ended; nobody wants its row."""
        if self.ended:
            return NOTHING
        reaction = NOTHING if self.row_ended else dismissed(self.row_id, None)
        self._fail(error)
        return reaction

    def finish(self, reason: "FinishReason.ValueType", timings: RowTimings, now: float) -> None:
        """Ends with the answer complete, or with an error when it is not what the caller holds."""
        self._relay.stay(ENDED)
        reason = self.leg.close(reason)
        if self.transcript.contradicted:
            self._fail(contradiction())
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
            legs=[
                LegUsage(model=leg.model, usage=leg.usage, unused=bool(leg.unused))
                for leg in self.legs
            ],
        )

    def _note_shown(self, now: float) -> None:
        if self.first_token_at is None and self.transcript.shown_ids:
            self.first_token_at = now

    def _fail(self, error: SluiceError) -> None:
        self._relay.stay(ENDED)
        self.error = error
        self._move(StreamState.FAILED)
        self._showing.wake()

    def _take_aside(self, frame: Frame, now: float) -> Reaction:
        """A frame of another row than the answer's."""
        standby = self._relay.stands_by(frame.request_id)
        if standby is None:
            leg = self._relay.of(frame.request_id)
            assert leg is not None, "its row was listened to"
            leg.take(frame, now)  # computed before the batcher heard of the end: it has its price
            return refused(frame)
        reaction = standby.take(frame, now)
        if standby.leg.error is not None:
            self._relay.lose(standby.leg.error)
        return reaction

    def _hand_over(self, now: float) -> Reaction:
        """The second model answers; what the first one said is void."""
        standby = self._relay.standby
        if standby is None:
            self._go_over(self._relay.second(now))
            self._cascade.launch(self, self.leg)
            return Reaction(began=self.row_id)
        self._go_over(standby.leg)
        if standby.published:
            self._move(StreamState.WAITING)
        self._catch_up(now)
        return NOTHING

    def _catch_up(self, now: float) -> None:
        """Shows what the leg has said while it stood by."""
        if self.transcript.token_ids:
            self._move(StreamState.STREAMING)
        self._conclude(None, now)  # what batchers must know of it they were told
        self._ask_guards()
        if not self.silent:
            self._note_shown(now)
            self._showing.release(self.transcript)

    def _ask_guards(self) -> None:
        if self.ticket.guards is not None and not self.row_ended and not self.holding:
            self.ticket.guards.produced(self, ended=False)

    def _computing(self) -> Iterator[Leg]:
        """The legs whose rows compute; not one whose task may not be stored yet."""
        if self.state in (StreamState.WAITING, StreamState.STREAMING):
            yield self.leg
        standby = self._relay.standby
        if standby is not None and not standby.over:
            yield standby.leg

    @property
    def _cascade(self) -> Cascade:
        assert self.ticket.cascade is not None, "only a cascade has a second model"
        return self.ticket.cascade

    def _go_over(self, leg: Leg) -> None:
        notice, self._awaited = self._relay.go_over(leg), None
        if self.ticket.guards is not None:
            self.ticket.guards.restart()
        self._move(StreamState.PUBLISHING)
        self._showing.begin_anew(notice)

    def _note_progress(self, taken: Taken, now: float) -> None:
        if self.first_frame_at is None:
            self.first_frame_at = now
        if taken.recovered:
            message = "another process continues the answer at the same token"
            self._showing.notify(Notice(kind=NOTICE_KIND_RECOVERED, message=message))
        if self.state is not StreamState.STREAMING and taken.token_ids:
            self._move(StreamState.STREAMING)

    def _conclude(self, resend_from: int | None, now: float) -> Reaction:
        """Ends with the leg, when that has ended."""
        leg, final = self.leg, self.leg.final
        if leg.stopped:
            row = RowTimings() if final is None else final.timings
            self.finish(FINISH_REASON_STOP_SEQUENCE, row, now)
        elif leg.transcript.contradicted:
            self._fail(contradiction())
        elif final is None:
            return (
                NOTHING if resend_from is None else Reaction(resends=((leg.row_id, resend_from),))
            )
        elif (reason := finish_reason_of(final.end)) is None:
            self._fail(error_of(final))
        else:
            self.finish(reason, final.timings, now)
        return dismissed(leg.row_id, final)

    def _reader_fell_behind(self, before: int) -> bool:
        """Wakes the reader; ends the stream when more waits for it than it may have unread."""
        error = None if self.silent else self._showing.grew(before, self.transcript)
        if error is not None:
            self._fail(error)
        return error is not None

    def _move(self, target: StreamState) -> None:
        assert target in LEGAL_MOVES[self.state], f"{self.state.name} to {target.name}"
        self.state = target
