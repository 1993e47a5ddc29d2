"""The models that work on one answer, one after the other, and whether the present one's may still be taken back."""

from gateway.cascades.watch import Verdict, Watch
from gateway.streams.assembler import Taken
from gateway.streams.endings import finish_reason_of
from gateway.streams.leg import Leg
from gateway.streams.ticket import Cascade
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    NOTICE_KIND_ESCALATED,
    Notice,
)


class Relay:
    """The legs of an answer.

    Attributes:
        legs: in order; the last one works now.
        holding: nothing is shown before the commit point of a cascade.
    """

    def __init__(self, first: Leg, cascade: Cascade | None) -> None:
        self.legs = [first]
        self.holding = cascade is not None and cascade.holds
        self._cascade = cascade
        self._watch: Watch | None = None if cascade is None else cascade.watch

    @property
    def leg(self) -> Leg:
        """The one that works now."""
        return self.legs[-1]

    @property
    def watched(self) -> bool:
        """Whether the answer may still be taken back for a second model's."""
        return self._watch is not None

    def left(self, model: str) -> bool:
        """Whether ``model`` worked on the answer before another one took over."""
        return bool(model) and model != self.leg.model and any(m.model == model for m in self.legs)

    def stay(self) -> None:
        """No second model answers, whatever the first one says."""
        self._watch, self.holding = None, False

    def in_doubt(self, taken: Taken, now: float) -> bool:
        """Whether the second model shall answer, now that ``taken`` came. Passing the commit point ends the watch."""
        transcript = self.leg.transcript
        if self._watch is None or transcript.contradicted or transcript.blocked:
            return False
        verdict, watch = self._verdict(taken, self._watch), self._watch
        if verdict is Verdict.PENDING:
            return False
        self.stay()
        return verdict is Verdict.DOUBT and self._may_go_over(watch.reason, now)

    def second(self, now: float) -> Leg:
        """The leg of the second model, which begins now."""
        assert self._cascade is not None, "only a cascade is handed over"
        return self._cascade.second(self.leg.transcript.draft, now)

    def go_over(self, leg: Leg) -> Notice:
        """``leg`` works from now on; what the one before said is void. Returns what the caller is told."""
        first = self.leg
        self.legs.append(leg)
        self.holding = False
        return Notice(
            kind=NOTICE_KIND_ESCALATED,
            message=f"{leg.model} answers instead of {first.model}: {first.handed_over}",
            model=leg.model,
        )

    def _verdict(self, taken: Taken, watch: Watch) -> Verdict:
        transcript, stopped = self.leg.transcript, self.leg.stopped
        verdict = watch.push(taken.logprobs)
        reason = None if taken.final is None else finish_reason_of(taken.final.end)
        if verdict is Verdict.PENDING and (stopped or reason is not None):
            transcript.close(truncated=reason != FINISH_REASON_STOP)
            truncated = reason == FINISH_REASON_LENGTH and not stopped
            verdict = watch.end(transcript.draft, truncated=truncated)
        return verdict

    def _may_go_over(self, reason: str, now: float) -> bool:
        assert self._cascade is not None, "it was watched"
        refusal = self._cascade.refusal(now)
        if refusal:
            self.leg.kept = f"{reason}; {refusal}"
            return False
        self.leg.handed_over = reason
        return True
