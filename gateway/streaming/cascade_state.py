"""The models that work on one answer, one after the other, and whether the current answer may still be replaced."""

from typing import Protocol

from gateway.routing.cascade.monitor import AnswerMonitor, CascadeDecision
from gateway.streaming.assembler import AcceptedFrame
from gateway.streaming.attempt import ModelAttempt, finish_reason_of
from sluice.internal.v1.frame_pb2 import Frame
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    NOTICE_KIND_ESCALATED,
    Notice,
)


class Cascade(Protocol):
    """How one answer may escalate to a second model.

    Attributes:
        monitor: decides whether the first model's answer is good enough.
        holds: nothing of it is shown before its commit point.
    """

    monitor: AnswerMonitor
    holds: bool

    def refusal(self, now: float) -> str:
        """Why the second model may not start now, or ""."""

    def start(self, draft: str, now: float) -> ModelAttempt:
        """Starts a row of the second model; ``draft`` is what the first one answered."""


class CascadeState:
    """The attempts at one answer. Without a cascade there is one, unless the safety policy reroutes.

    Attributes:
        attempts: all, in the order in which they began.
        current: the one whose answer it is.
        holding: nothing is shown before the commit point.
    """

    def __init__(self, first: ModelAttempt, cascade: Cascade | None) -> None:
        self.attempts = [first]
        self.current = first
        self.holding = cascade is not None and cascade.holds
        self._cascade = cascade
        self._monitor = None if cascade is None else cascade.monitor
        """None once the current answer cannot be replaced by the cascade any more."""

    def attempt_of(self, row_id: str) -> ModelAttempt:
        """The attempt with that row."""
        return next(one for one in self.attempts if one.row_id == row_id)

    def accept_other(self, frame: Frame, now: float) -> None:
        """Adds a frame of an earlier row, computed before its batcher learned that it is not needed: it is usage."""
        self.attempt_of(frame.request_id).accept(frame, now)

    def commit(self) -> None:
        """The current answer stays."""
        self._monitor, self.holding = None, False

    def should_escalate(self, accepted: AcceptedFrame, now: float) -> bool:
        """Whether the second model shall answer, now that ``accepted`` arrived; commits where the decision says so."""
        decision, doubt = self._decision(accepted)
        if decision is CascadeDecision.ESCALATE:
            return self._may_escalate(doubt, now)
        if decision is CascadeDecision.COMMIT:
            self.commit()
        return False

    def escalate(self, now: float) -> Notice:
        """The second model answers from now on, with a row that starts now. Returns a notice for callers."""
        assert self._cascade is not None, "only a cascade has a second model"
        return self.switch_to(self._cascade.start(self.current.transcript.text, now))

    def switch_to(self, attempt: ModelAttempt) -> Notice:
        """``attempt`` gives the answer from now on; the previous answer is void. Returns a notice for callers."""
        previous, self.current = self.current, attempt
        self.attempts.append(attempt)
        return Notice(
            kind=NOTICE_KIND_ESCALATED,
            message=f"{attempt.model} answers instead of {previous.model}: {previous.escalation_reason}",
            model=attempt.model,
        )

    def _decision(self, accepted: AcceptedFrame) -> tuple[CascadeDecision, str]:
        """What the monitor decides about the answer, and why it is in doubt; a complete answer is never pending."""
        monitor, attempt = self._monitor, self.current
        if monitor is None or attempt.transcript.visible.contradicted or attempt.transcript.blocked:
            return CascadeDecision.PENDING, ""
        decision = monitor.push(accepted.logprobs)
        reason = None if accepted.final is None else finish_reason_of(accepted.final.end)
        if decision is CascadeDecision.PENDING and (attempt.stopped or reason is not None):
            attempt.transcript.end()
            if not attempt.unread:
                attempt.transcript.close(truncated=reason != FINISH_REASON_STOP)
            truncated = reason == FINISH_REASON_LENGTH and not attempt.stopped
            decision = monitor.end(attempt.judged_text, truncated=truncated)
        return decision, monitor.reason

    def _may_escalate(self, doubt: str, now: float) -> bool:
        assert self._cascade is not None, "it was monitored"
        if refusal := self._cascade.refusal(now):
            self.current.kept_reason = f"{doubt}; {refusal}"
            self.commit()
            return False
        self.current.escalation_reason = doubt
        self.commit()
        return True
