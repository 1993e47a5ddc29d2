"""Whether the first answer of a cascade has been promised to the caller, or may still be taken back."""

from gateway.routing.cascade.monitor import AnswerMonitor, CascadeDecision
from gateway.streaming.assembler import Taken
from gateway.streaming.endings import finish_reason_of
from gateway.streaming.leg import Leg
from gateway.streaming.ticket import Cascade
from sluice.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP


class Promise:
    """Of one answer; without a cascade it is given at once.

    Attributes:
        holding: nothing is shown before it is given.
        reason: why the answer was in doubt.
    """

    def __init__(self, cascade: Cascade | None) -> None:
        self.holding = cascade is not None and cascade.holds
        self._watch: AnswerMonitor | None = None if cascade is None else cascade.watch
        self.reason = ""

    @property
    def open(self) -> bool:
        """Whether the answer is watched."""
        return self._watch is not None

    def close(self) -> None:
        """The answer is not watched any more."""
        self._watch, self.holding = None, False

    def verdict(self, leg: Leg, taken: Taken) -> CascadeDecision:
        """What to do about the answer of ``leg``, now that ``taken`` came; its end is always a commit or a doubt."""
        watch, transcript = self._watch, leg.transcript
        if watch is None or transcript.contradicted or transcript.blocked:
            return CascadeDecision.PENDING
        verdict = watch.push(taken.logprobs)
        reason = None if taken.final is None else finish_reason_of(taken.final.end)
        if verdict is CascadeDecision.PENDING and (leg.stopped or reason is not None):
            transcript.close(truncated=reason != FINISH_REASON_STOP)
            truncated = reason == FINISH_REASON_LENGTH and not leg.stopped
            verdict = watch.end(transcript.draft, truncated=truncated)
        self.reason = watch.reason
        return verdict
