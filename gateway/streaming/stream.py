"""One request that waits for its answer: frames go in, events come out.

What is known of it is in `Answer`; here is what follows when something happens.
"""

from collections.abc import Iterator
from typing import Final

from gateway.streaming.answer import Answer
from gateway.streaming.endings import contradiction, error_of, finish_reason_of
from gateway.streaming.leg import Leg
from gateway.streaming.outbox import NOTHING, Reaction, dismissed, refused
from gateway.streaming.reader import Reader
from gateway.streaming.relay import ENDED, REROUTED
from gateway.streaming.states import StreamState
from gateway.streaming.ticket import Cascade
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import Frame, RowTimings
from sluice.v1.inference_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_STOP_SEQUENCE,
    NOTICE_KIND_RECOVERED,
    FinishReason,
    GenerateResponse,
    Notice,
)

_RECOVERED: Final = Notice(
    kind=NOTICE_KIND_RECOVERED, message="another process continues the answer at the same token"
)


class Stream(Answer):
    """An answer that comes, and what follows from what happens to it."""

    def attach(self, reader: Reader, model: str = "") -> None:
        """``reader`` reads from now on; what it holds is of ``model``, or of the present one when that is empty."""
        self._showing.attach(reader, self.transcript, anew=self._relay.left(model))

    def detach(self) -> Reader | None:
        """Nobody reads any more; returns the call that did."""
        return self._showing.detach()

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
        elif row_id in ("", self.row_id):
            self._course.published()

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
            return self._relay.take_aside(frame, now)
        if self.state is StreamState.CHECKING:  # said again: the row has ended
            return refused(frame) if frame.HasField("final") else NOTHING
        # That something waited to be shown is not the reader's fault.
        first, before = self.leg, 0 if self.silent else len(self.transcript.shown_ids)
        taken = first.take(frame, now)
        self._course.frame_came(tokens=bool(taken.token_ids), now=now)
        if taken.recovered:
            self._showing.notify(_RECOVERED)
        if self._relay.in_doubt(taken, now):
            return dismissed(first.row_id, first.final) + self._hand_over(now)
        if taken.token_ids and not self.silent:
            self._course.shown(now)
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
        publishing = self.leg if self.state is StreamState.PUBLISHING else None
        legs = (leg for leg in self._computing() if leg is not publishing)
        asked = ((leg.row_id, leg.assembler.overdue(now)) for leg in legs)
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
        awaited = self._course.awaited
        if awaited is not None and not guards.checks.waits:
            self._finish(*awaited, now)
        elif not self.silent and self.reader is not None:
            self._note_shown(now)
            self._showing.release(self.transcript)

    def block(self, rules: tuple[str, ...], now: float) -> Reaction:
        """Guards end the answer: what has been given to a caller stays, nothing else is shown."""
        reaction = NOTHING if self.row_ended else dismissed(self.row_id, None)
        self._relay.stay(ENDED)
        self._showing.withhold(rules)
        self.transcript.close(truncated=True)
        awaited = self._course.awaited
        row = RowTimings() if awaited is None else awaited[1]
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
                self._course.check(reason, timings)
                self._showing.wake()
                return
        self._finish(reason, timings, now)

    def _finish(self, reason: "FinishReason.ValueType", timings: RowTimings, now: float) -> None:
        if not self._showing.withheld_by:
            self._note_shown(now)
        self._course.finish(self._finished_event(reason, timings, now))
        self._showing.wake()

    def _note_shown(self, now: float) -> None:
        if self.transcript.shown_ids:
            self._course.shown(now)

    def _fail(self, error: SluiceError) -> None:
        self._relay.stay(ENDED)
        self._course.fail(error)
        self._showing.wake()

    def _hand_over(self, now: float) -> Reaction:
        """The second model answers; what the first one said is void."""
        standby = self._relay.standby
        if standby is None:
            self._go_over(self._relay.second(now))
            self._cascade.launch(self, self.leg)
            return Reaction(began=self.row_id)
        self._go_over(standby.leg)
        if standby.published:
            self._course.published()
        self._catch_up(now)
        return NOTHING

    def _catch_up(self, now: float) -> None:
        """Shows what the leg has said while it stood by."""
        self._course.frame_came(tokens=bool(self.transcript.token_ids), now=now)
        self._conclude(None, now)  # what batchers must know of it they were told
        self._ask_guards()
        if not self.silent:
            self._note_shown(now)
            self._showing.release(self.transcript)

    def _ask_guards(self) -> None:
        if self.ticket.guards is not None and not self.row_ended and not self.holding:
            self.ticket.guards.produced(self, ended=False)

    def _computing(self) -> Iterator[Leg]:
        """The legs whose rows compute."""
        if not self.row_ended:
            yield self.leg
        standby = self._relay.standby
        if standby is not None and not standby.over:
            yield standby.leg

    @property
    def _cascade(self) -> Cascade:
        assert self.ticket.cascade is not None, "only a cascade has a second model"
        return self.ticket.cascade

    def _go_over(self, leg: Leg) -> None:
        notice = self._relay.go_over(leg)
        if self.ticket.guards is not None:
            self.ticket.guards.restart()
        self._course.begin_anew()
        self._showing.begin_anew(notice)

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
