"""The models that work on one answer, and whether the present one's may still be taken back.

They work one after the other; in a speculative cascade the second one's row runs beside the first one's until that is
promised or in doubt.
"""

from typing import Final

from gateway.routing.cascade.monitor import CascadeDecision
from gateway.streaming.assembler import Taken
from gateway.streaming.endings import error_of
from gateway.streaming.leg import Leg
from gateway.streaming.outbox import NOTHING, Reaction, refused
from gateway.streaming.promise import Promise
from gateway.streaming.standby import Standby
from gateway.streaming.ticket import Cascade
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import ROW_END_FAILED, ROW_END_REFUSED, Frame
from sluice.v1.inference_pb2 import NOTICE_KIND_ESCALATED, Notice

COMMITTED: Final = "the first answer passed its commit point"
KEPT: Final = "the first answer was kept although in doubt"
REROUTED: Final = "the safety policy chose another model"
ENDED: Final = "the request ended before it was needed"

_FAILED: Final = frozenset({ROW_END_FAILED, ROW_END_REFUSED})


class Relay:
    """The legs of an answer.

    Attributes:
        legs: all, in the order in which they began.
        leg: the one whose answer it is now.
        standby: the row that runs beside it; there is one only while the answer is watched.
        promise: whether that may still be taken back.
    """

    def __init__(self, first: Leg, cascade: Cascade | None) -> None:
        self.legs = [first]
        self.leg = first
        self.standby: Standby | None = None
        self.promise = Promise(cascade)
        self._cascade = cascade
        self._dismissals = NOTHING

    def left(self, model: str) -> bool:
        """Whether ``model`` gave the answer before another one took over."""
        if not model or model == self.leg.model:
            return False
        return any(leg.model == model and leg.handed_over for leg in self.legs)

    def stands_by(self, row_id: str) -> Standby | None:
        """The standby, when that is its row."""
        known = self.standby is not None and self.standby.leg.row_id == row_id
        return self.standby if known else None

    def take_aside(self, frame: Frame, now: float) -> Reaction:
        """Adds a frame of another row than the answer's."""
        standby = self.stands_by(frame.request_id)
        if standby is not None:
            reaction = standby.take(frame, now)
            if standby.leg.error is not None:
                self.lose(standby.leg.error)
            return reaction
        # Computed before its batcher heard that nobody wants it: it has its price.
        next(leg for leg in self.legs if leg.row_id == frame.request_id).take(frame, now)
        return refused(frame)

    def stand_by(self, now: float) -> Leg | None:
        """The leg of a second model that begins together with the first; None when it does not."""
        cascade = self._cascade
        if cascade is None or not cascade.together or not self.promise.open:
            return None
        self.leg.alone = cascade.refusal(now, ahead=True)
        if self.leg.alone:
            return None
        leg = cascade.second("", now)
        self.legs.append(leg)
        self.standby = Standby(leg)
        return leg

    def lose(self, error: SluiceError) -> None:
        """The standby has failed with ``error``: from now on it is a cascade as any other."""
        assert self.standby is not None, "asked for its row"
        self.standby.leg.error = error
        self._dismiss(f"it failed before it was needed: {error.reason}")

    def stay(self, why: str) -> None:
        """No second model answers, whatever the first one says."""
        self.promise.close()
        if self.standby is not None:
            self._dismiss(why)

    def dismissals(self) -> Reaction:
        """What batchers must be told of a standby that was let go since the last call."""
        dismissals, self._dismissals = self._dismissals, NOTHING
        return dismissals

    def in_doubt(self, taken: Taken, now: float) -> bool:
        """Whether the second model shall answer, now that ``taken`` came. Passing the commit point ends the watch."""
        if self._failed(taken):
            return True
        verdict = self.promise.verdict(self.leg, taken)
        if verdict is CascadeDecision.ESCALATE:
            return self._may_go_over(self.promise.reason, now)
        if verdict is CascadeDecision.COMMIT:
            self.stay(COMMITTED)
        return False

    def second(self, now: float) -> Leg:
        """The leg of the second model, which begins now."""
        assert self._cascade is not None, "only a cascade is handed over"
        return self._cascade.second(self.leg.transcript.draft, now)

    def go_over(self, leg: Leg) -> Notice:
        """``leg`` is the answer from now on; what the one before said is void. Returns what the caller is told."""
        first, self.leg = self.leg, leg
        if self.stands_by(leg.row_id):
            self.standby = None
        else:
            self.legs.append(leg)
        return Notice(
            kind=NOTICE_KIND_ESCALATED,
            message=f"{leg.model} answers instead of {first.model}: {first.handed_over}",
            model=leg.model,
        )

    def _failed(self, taken: Taken) -> bool:
        """Whether the first row failed where the second one can take over at once."""
        final = taken.final
        if self.standby is None or final is None or final.end not in _FAILED:
            return False
        self.leg.error = error_of(final)
        self._leave(f"it failed: {self.leg.error.reason}")
        return True

    def _may_go_over(self, reason: str, now: float) -> bool:
        assert self._cascade is not None, "it was watched"
        refusal = ""
        if self.standby is None or not self.standby.said_something:
            refusal = self._cascade.refusal(now, ahead=False)
        if refusal:
            self.leg.kept = f"{reason}; {refusal}"
            self.stay(KEPT)
            return False
        self._leave(reason)
        return True

    def _leave(self, reason: str) -> None:
        self.leg.handed_over = reason
        self.promise.close()

    def _dismiss(self, why: str) -> None:
        assert self.standby is not None, "asked before"
        assert self._cascade is not None, "it has sent the row"
        self._dismissals += self.standby.dismiss(why)
        self.standby = None
        self._cascade.unneeded()
