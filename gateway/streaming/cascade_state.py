"""The models that work on one answer, and whether the current one's answer may still be replaced.

They work one after the other. In a speculative cascade the second model's row runs beside the first one's until the
first answer passes its commit point or is in doubt.
"""

from typing import Final, Protocol

from gateway.routing.cascade.monitor import AnswerMonitor, CascadeDecision
from gateway.streaming.assembler import AcceptedFrame
from gateway.streaming.attempt import ModelAttempt, error_of, finish_reason_of
from gateway.streaming.dispatch import Dispatch
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import ROW_END_FAILED, ROW_END_REFUSED, Frame
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    NOTICE_KIND_ESCALATED,
    Notice,
)

COMMITTED: Final = "the first answer passed its commit point"
KEPT: Final = "the first answer was kept although in doubt"
REROUTED: Final = "the safety policy chose another model"
ENDED: Final = "the request ended before it was needed"

_FAILED: Final = frozenset({ROW_END_FAILED, ROW_END_REFUSED})


class Cascade(Protocol):
    """How one answer may escalate to a second model.

    Attributes:
        monitor: decides whether the first model's answer is good enough.
        holds: nothing of it is shown before its commit point.
        speculative: the second model's row runs from the beginning.
    """

    monitor: AnswerMonitor
    holds: bool
    speculative: bool

    def refusal(self, now: float, *, ahead: bool) -> str:
        """Why the second model may not start now, or "". ``ahead``: the first answer is not in doubt yet."""

    def start(self, draft: str, now: float) -> ModelAttempt:
        """Starts a row of the second model; ``draft`` is what the first one answered."""

    def backup_dropped(self) -> None:
        """The row that was started is not needed: the request has not escalated."""


class CascadeState:
    """The attempts at one answer. Without a cascade there is one, unless the safety policy reroutes.

    Attributes:
        attempts: all, in the order in which they began.
        current: the one whose answer it is.
        backup: the second model's attempt that runs beside the first one in case it is needed; only before the commit
            point. When it fails, the first answer is not affected: the cascade continues without it.
        holding: nothing is shown before the commit point.
    """

    def __init__(self, first: ModelAttempt, cascade: Cascade | None, dispatch: Dispatch) -> None:
        self.attempts = [first]
        self.current = first
        self.backup: ModelAttempt | None = None
        self.holding = cascade is not None and cascade.holds
        self._cascade = cascade
        self._monitor = None if cascade is None else cascade.monitor
        """None once the current answer cannot be replaced by the cascade any more."""
        self._dispatch = dispatch

    def is_backup(self, row_id: str) -> bool:
        """Whether that is the backup's row."""
        return self.backup is not None and self.backup.row_id == row_id

    def attempt_of(self, row_id: str) -> ModelAttempt:
        """The attempt with that row."""
        return next(one for one in self.attempts if one.row_id == row_id)

    def start_backup(self, now: float) -> None:
        """Starts the second model's row, if the cascade is speculative and its bounds allow it."""
        cascade = self._cascade
        if cascade is None or not cascade.speculative or self._monitor is None:
            return
        self.current.single_start_reason = cascade.refusal(now, ahead=True)
        if not self.current.single_start_reason:
            self.backup = cascade.start("", now)
            self.attempts.append(self.backup)

    def accept_other(self, frame: Frame, now: float) -> None:
        """Adds a frame of another row than the current one's."""
        attempt = self.attempt_of(frame.request_id)
        if attempt is not self.backup:
            # Computed before its batcher learned that it is not needed: it counts as usage.
            attempt.accept(frame, now)
        elif not attempt.complete:
            self._accept_backup(attempt, attempt.accept(frame, now))

    def fail_backup(self, error: SluiceError) -> None:
        """The backup has failed with ``error``: the cascade continues without it."""
        assert self.backup is not None, "it has just failed"
        self.backup.error = error
        self._drop_backup(f"it failed before it was needed: {error.reason}")

    def commit(self, reason: str) -> None:
        """The current answer stays; ``reason`` says why a backup is not needed."""
        self._monitor, self.holding = None, False
        if self.backup is not None:
            self._drop_backup(reason)

    def should_escalate(self, accepted: AcceptedFrame, now: float) -> bool:
        """Whether the second model shall answer, now that ``accepted`` arrived; commits where the decision says so."""
        if self._failed(accepted):
            return True
        decision, doubt = self._decision(accepted)
        if decision is CascadeDecision.ESCALATE:
            return self._may_escalate(doubt, now)
        if decision is CascadeDecision.COMMIT:
            self.commit(COMMITTED)
        return False

    def escalate(self, now: float) -> Notice:
        """The second model answers from now on: the backup, or a row that starts now. Returns a notice for callers."""
        assert self._cascade is not None, "only a cascade has a second model"
        backup, self.backup = self.backup, None
        return self.switch_to(backup or self._cascade.start(self.current.transcript.text, now))

    def switch_to(self, attempt: ModelAttempt) -> Notice:
        """``attempt`` gives the answer from now on; the previous answer is void. Returns a notice for callers."""
        previous, self.current = self.current, attempt
        if attempt is not self.attempts[-1]:
            self.attempts.append(attempt)
        return Notice(
            kind=NOTICE_KIND_ESCALATED,
            message=f"{attempt.model} answers instead of {previous.model}: {previous.escalation_reason}",
            model=attempt.model,
        )

    def _accept_backup(self, backup: ModelAttempt, accepted: AcceptedFrame) -> None:
        if accepted.final is not None or backup.stopped:
            self._dispatch.release(backup.row_id, accepted.final)
        elif accepted.gap:
            self._dispatch.ask(backup.row_id)
        if accepted.final is not None and finish_reason_of(accepted.final.end) is None:
            self.fail_backup(error_of(accepted.final))

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

    def _failed(self, accepted: AcceptedFrame) -> bool:
        """Whether the first row failed while the backup can take over."""
        final = accepted.final
        if self.backup is None or final is None or final.end not in _FAILED:
            return False
        self.current.error = error_of(final)
        self._stop_monitoring(f"it failed: {self.current.error.reason}")
        return True

    def _may_escalate(self, doubt: str, now: float) -> bool:
        assert self._cascade is not None, "it was monitored"
        ready = self.backup is not None and self.backup.has_output
        refusal = "" if ready else self._cascade.refusal(now, ahead=False)
        if refusal:
            self.current.kept_reason = f"{doubt}; {refusal}"
            self.commit(KEPT)
            return False
        self._stop_monitoring(doubt)
        return True

    def _stop_monitoring(self, reason: str) -> None:
        self.current.escalation_reason = reason
        self._monitor, self.holding = None, False

    def _drop_backup(self, reason: str) -> None:
        assert self.backup is not None, "checked by the caller"
        assert self._cascade is not None, "it started the row"
        backup, self.backup = self.backup, None
        backup.unused_reason = reason
        if not backup.complete:
            self._dispatch.cancel(backup.row_id)
        self._cascade.backup_dropped()
