"""A second model's row that computes beside the first one's, in case its answer is needed (speculative cascade).

What comes of it waits in its leg, as much as an answer may hold. Whatever happens to it is no business of the first
answer: a row that fails is lost, and the cascade is an ordinary one from then on.
"""

from gateway.streaming.endings import error_of, finish_reason_of
from gateway.streaming.leg import Leg
from gateway.streaming.outbox import NOTHING, Reaction, dismissed, refused
from sluice.internal.v1.frame_pb2 import Frame


class Standby:
    """The row.

    Attributes:
        leg: what came of it.
        published: JetStream has its task.
    """

    def __init__(self, leg: Leg) -> None:
        self.leg = leg
        self.published = False

    @property
    def over(self) -> bool:
        """Whether it computes no more: its answer is complete."""
        return self.leg.stopped or self.leg.final is not None

    @property
    def said_something(self) -> bool:
        """Whether going over to it shows something at once."""
        return self.over or bool(self.leg.transcript.token_ids)

    def take(self, frame: Frame, now: float) -> Reaction:
        """Adds what ``frame`` brings; `Leg.error` is set when the row has failed."""
        if self.over:
            return refused(frame)
        leg = self.leg
        taken = leg.take(frame, now)
        if taken.final is not None and finish_reason_of(taken.final.end) is None:
            leg.error = error_of(taken.final)
        if taken.final is not None or leg.stopped:
            return dismissed(leg.row_id, taken.final)
        if taken.resend_from is not None:
            return Reaction(resends=((leg.row_id, taken.resend_from),))
        return NOTHING

    def dismiss(self, why: str) -> Reaction:
        """It is not needed."""
        self.leg.unused = why
        return NOTHING if self.over else dismissed(self.leg.row_id, None)
