"""What is known of one answer while it comes and afterwards."""

from collections.abc import Sequence

from gateway.streaming.course import Course
from gateway.streaming.endings import timings_of
from gateway.streaming.leg import Leg
from gateway.streaming.reader import Reader
from gateway.streaming.relay import Relay
from gateway.streaming.showing import Showing
from gateway.streaming.states import StreamState
from gateway.streaming.ticket import Ticket
from gateway.streaming.transcript import Transcript
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.v1.inference_pb2 import Finished, FinishReason, ModelUsage, Started


class Answer:
    """One answer: which model works on it (`Relay`), what callers may see (`Showing`), how it stands (`Course`).

    Attributes:
        ticket: what was fixed at admission.
    """

    def __init__(self, ticket: Ticket, leg: Leg) -> None:
        self.ticket = ticket
        self._relay = Relay(leg, ticket.cascade)
        self._showing = Showing(ticket.with_logprobs)
        self._course = Course()

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
    def state(self) -> StreamState:
        """Where it stands."""
        return self._course.state

    @property
    def error(self) -> SluiceError | None:
        """Why it failed, in state FAILED."""
        return self._course.error

    @property
    def finished(self) -> Finished | None:
        """How it ended, in state FINISHED."""
        return self._course.finished

    @property
    def first_frame_at(self) -> float | None:
        """When the first frame came, seconds."""
        return self._course.first_frame_at

    @property
    def first_token_at(self) -> float | None:
        """When there was something to show for the first time, seconds."""
        return self._course.first_token_at

    @property
    def ended(self) -> bool:
        """Whether nothing will be added."""
        return self._course.ended

    @property
    def row_ended(self) -> bool:
        """Whether no row computes for it."""
        return self._course.row_ended

    @property
    def reader(self) -> Reader | None:
        """The call that reads, or None when it has gone."""
        return self._showing.reader

    @property
    def holding(self) -> bool:
        """Whether nothing is shown before the commit point of a cascade."""
        return self._relay.promise.holding

    @property
    def silent(self) -> bool:
        """Whether nothing of the answer may be shown yet."""
        guards = self.ticket.guards
        return self.holding or (guards is not None and guards.checks.holds)

    def started(self, model: str = "") -> Started:
        """The first event for a caller who holds a part of ``model``, or nothing."""
        started = Started()
        started.CopyFrom(self.ticket.started)
        if not self._relay.left(model):
            started.model = self.leg.model
            started.prompt_tokens = self.leg.prompt_tokens
        return started

    def holds_beginning(self, token_ids: Sequence[int], model: str = "") -> bool:
        """Whether ``token_ids`` of ``model`` are the beginning of the answer, as far as a caller can know it."""
        return self._relay.left(model) or self.transcript.starts_with(token_ids)

    def held(self, row_id: str) -> Leg | None:
        """The leg of a row that computes for the answer; None when nobody waits for the row."""
        standby = self._relay.stands_by(row_id)
        if standby is not None:
            return None if standby.over else standby.leg
        return self.leg if row_id == self.row_id and not self.row_ended else None

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
            attempts=[
                ModelUsage(model=leg.model, usage=leg.usage, unused=bool(leg.unused))
                for leg in self.legs
            ],
        )
