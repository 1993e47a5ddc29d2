"""One request that waits for its answer: frames go in, events come out.

A `Stream` knows how far the answer is (`lifecycle` has the legal moves), and decides what follows from each event: its
`CascadeState` says which model gives the answer, its `Delivery` what callers may see.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from gateway.safety.findings import Finding
from gateway.safety.guards.checks import Checks
from gateway.safety.output.windows import Window
from gateway.streaming.attempt import ModelAttempt, error_of, finish_reason_of
from gateway.streaming.cascade_state import Cascade, CascadeState
from gateway.streaming.delivery import Delivery, Reader
from gateway.streaming.dispatch import Dispatch
from gateway.streaming.lifecycle import ENDED, LEGAL_MOVES, StreamSpec, StreamState
from sluice.errors import InvalidRequest, SluiceError
from sluice.internal.v1.frame_pb2 import Frame, RowTimings
from sluice.internal.v1.gateway_pb2 import KeyRecord
from sluice.v1.inference_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_STOP_SEQUENCE,
    NOTICE_KIND_RECOVERED,
    Finished,
    FinishReason,
    GenerateResponse,
    ModelUsage,
    Notice,
    Started,
)
from sluice.wire.tokens import VisibleToken

_RECOVERED: Final = Notice(
    kind=NOTICE_KIND_RECOVERED, message="another process continues the answer at the same token"
)


class Guards(Protocol):
    """The guard models that check the prompt and the answer of one request."""

    @property
    def checks(self) -> Checks:
        """Which checks are due, and their outcomes."""

    def check_answer(self, stream: "Stream", *, ended: bool) -> None:
        """The answer of ``stream`` has grown, or ended: starts the checks that are due."""


class Stream:
    """The answer to one request while it is computed, and after its end.

    Attributes:
        spec: what was fixed at admission.
        state: how far it is.
        error: why it failed, in state FAILED.
        finished: how it ended, in state FINISHED.
        first_frame_at: when the first frame arrived, seconds.
        first_token_at: when there was something to show for the first time, seconds.
        cascade: the models that work on it.
        delivery: what callers may see of it.
        guards: its checks, if the policy has guard models.
    """

    def __init__(
        self,
        spec: StreamSpec,
        first: ModelAttempt,
        dispatch: Dispatch,
        cascade: Cascade | None = None,
        guards: Guards | None = None,
    ) -> None:
        self.spec = spec
        self.state = StreamState.PUBLISHING
        self.error: SluiceError | None = None
        self.finished: Finished | None = None
        self.first_frame_at: float | None = None
        self.first_token_at: float | None = None
        self._row_end: tuple[FinishReason.ValueType, RowTimings] | None = None
        """How the answer ends if no guard objects, in state CHECKING."""
        self.cascade = CascadeState(first, cascade)
        self.delivery = Delivery(spec, first)
        self.guards = guards
        self._dispatch = dispatch

    @property
    def ended(self) -> bool:
        """Whether the answer is complete or failed."""
        return self.state in ENDED

    @property
    def row_ended(self) -> bool:
        """Whether no row computes the answer any more."""
        return self.ended or self.state is StreamState.CHECKING

    @property
    def request_id(self) -> str:
        """The name of the request."""
        return self.spec.started.request_id

    @property
    def fingerprint(self) -> bytes:
        """Equal for equal requests."""
        return self.spec.fingerprint

    @property
    def attempts(self) -> list[ModelAttempt]:
        """The models that worked on it, in the order in which they began."""
        return self.cascade.attempts

    @property
    def current(self) -> ModelAttempt:
        """The model whose answer it is now."""
        return self.cascade.current

    @property
    def hidden(self) -> bool:
        """Whether nothing of the answer may be shown yet."""
        return self.cascade.holding or (self.guards is not None and self.guards.checks.holds)

    @property
    def escalation_reason(self) -> str:
        """Why another model took over last, if one did."""
        reasons = [one.escalation_reason for one in self.attempts if one.escalation_reason]
        return reasons[-1] if reasons else ""

    @property
    def first_token_s(self) -> float | None:
        """From the arrival of the request to its first token, seconds."""
        first_at = self.first_token_at
        return None if first_at is None else first_at - self.spec.timings.arrived_at

    def matches(self, held: Sequence[VisibleToken], model: str) -> bool:
        """Whether ``held``, tokens of ``model``, are the beginning of the answer, as far as a caller can know it."""
        return self.delivery.matches(held, model)

    def record(self) -> KeyRecord:
        """What is kept of a complete answer."""
        assert self.finished is not None, "only complete answers are kept"
        answer = self.delivery.stored(self.finished)
        answer.escalation_reason = self.escalation_reason
        if (first_token_s := self.first_token_s) is not None:
            answer.first_token_s = first_token_s
        return KeyRecord(fingerprint=self.spec.fingerprint, answer=answer)

    def started(self, reader: Reader, held_model: str) -> Started | None:
        """The first event for a ``reader`` that holds tokens of ``held_model``; None while the task is published.

        Raises:
            SluiceError: see `read`.
        """
        self._raise_error(reader)
        if self.state is StreamState.PUBLISHING:
            return None
        return self.delivery.started(held_model)

    def text_before(self, index: int) -> str:
        """What callers see of the tokens before ``index``."""
        return self.delivery.text_before(index)

    def read(self, reader: Reader) -> list[GenerateResponse]:
        """The events that ``reader`` has not had, all unread tokens in one delta.

        Raises:
            SluiceError: the stream ended with it, or another call took over.
        """
        self._raise_error(reader)
        return self.delivery.read(reader, self.finished, hidden=self.hidden)

    def _raise_error(self, reader: Reader) -> None:
        error = reader.displaced_by or self.error
        if error is not None:
            raise error

    def published(self, row_id: str) -> None:
        """A batcher or JetStream has the task of the row."""
        attempt = self.cascade.attempt_of(row_id)
        attempt.published = True
        if attempt is self.current and self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)
        self.delivery.wake()

    def publish_failed(self, row_id: str, error: SluiceError) -> None:
        """The task of the row could not be sent, as far as is known: frames prove the contrary."""
        if self.state is StreamState.PUBLISHING:
            self.row_failed(row_id, error)
        self.delivery.wake()

    def row_failed(self, row_id: str, error: SluiceError) -> None:
        """A frame of the row could not be processed: fails the answer, if it is its current row."""
        if row_id == self.current.row_id:
            self.fail(error)

    def accept(self, frame: Frame, now: float) -> None:
        """Adds what is new in ``frame``."""
        if frame.request_id != self.current.row_id:
            self.cascade.accept_other(frame, now)
        elif (
            self.state is not StreamState.CHECKING
        ):  # else the row has ended: a repeated final frame
            self._accept_current(frame, now)

    def _accept_current(self, frame: Frame, now: float) -> None:
        attempt = self.current
        # A reader is not to blame for tokens that it may not see yet.
        before = 0 if self.hidden else len(attempt.transcript.visible.token_ids)
        accepted = attempt.accept(frame, now)
        self._set_frame_arrived(with_tokens=bool(accepted.token_ids), now=now)
        if accepted.recovered:
            self.delivery.notify(_RECOVERED)
        if self.cascade.should_escalate(accepted, now):
            self._dispatch.release(attempt.row_id, attempt.final)
            self._restart(self.cascade.escalate(now))
            return
        if accepted.token_ids and not self.hidden:
            self._note_shown(now)
        if self._finish_if_complete(now):
            self._dispatch.release(attempt.row_id, attempt.final)
        elif accepted.gap:
            self._dispatch.ask(attempt.row_id)
        self._check_answer()
        if not (self.row_ended or self.hidden):
            too_slow = self.delivery.show_since(before)
            if too_slow is not None:
                self.fail(too_slow)

    def reroute(self, attempt: ModelAttempt, reason: str) -> None:
        """A governed model gives the answer with ``attempt``; its task must still be sent."""
        self._cancel_row()
        self.current.escalation_reason = reason
        self.cascade.commit()
        self._restart(self.cascade.switch_to(attempt))

    def verdict_passed(self, now: float) -> None:
        """A guard lets the answer go on: shows and ends what waited for its verdict alone."""
        if self._row_end is not None and not self._waits:
            self._close(*self._row_end, now)
        elif not self.hidden and self.delivery.reader is not None:
            self._show_held_back(now)

    def settle(
        self, attempt: ModelAttempt, window: Window, findings: Sequence[Finding], now: float
    ) -> None:
        """Token classifiers have read ``window`` of what ``attempt`` answers; `verdict_passed` shows it."""
        attempt.settle(window, findings)
        if attempt is self.current and attempt.stopped and not self.row_ended:
            self._finish_if_complete(now)
            self._dispatch.release(attempt.row_id, attempt.final)

    def block(self, rules: tuple[str, ...], now: float) -> None:
        """A guard ends the answer: callers keep what was delivered, nothing else is shown."""
        self._cancel_row()
        self.cascade.commit()
        self.delivery.withhold(rules)
        self.current.transcript.close(truncated=True)
        row = RowTimings() if self._row_end is None else self._row_end[1]
        self._finish(FINISH_REASON_CONTENT_FILTER, row, now)

    def fail(self, error: SluiceError) -> None:
        """Ends with ``error``, unless it has ended; its row is cancelled."""
        if not self.ended:
            self._cancel_row()
            self._fail(error)

    def finish(self, reason: "FinishReason.ValueType", row: RowTimings, now: float) -> None:
        """Ends with the answer complete, or with an error when it is not what the caller holds."""
        self.cascade.commit()
        attempt = self.current
        attempt.transcript.end()
        if self.guards is None or not attempt.unread:
            reason = attempt.close(reason)
        if self.guards is not None and not attempt.transcript.visible.contradicted:
            self.guards.check_answer(self, ended=True)
            if self._waits:
                self._row_end = reason, row
                self._move(StreamState.CHECKING)
                self.delivery.wake()
                return
        self._close(reason, row, now)

    @property
    def _waits(self) -> bool:
        """Whether guard models have something to say before the answer may end."""
        return self.guards is not None and (self.guards.checks.waits or self.current.unread)

    def _close(self, reason: "FinishReason.ValueType", row: RowTimings, now: float) -> None:
        reason = self.current.close(reason)
        if self.current.transcript.visible.contradicted:
            self._fail(_contradiction())
        else:
            self._finish(reason, row, now)

    def _finish_if_complete(self, now: float) -> bool:
        """Ends the answer when the current attempt has; whether it did."""
        attempt, final = self.current, self.current.final
        if attempt.stopped:
            row = RowTimings() if final is None else final.timings
            self.finish(FINISH_REASON_STOP_SEQUENCE, row, now)
        elif attempt.transcript.visible.contradicted:
            self._fail(_contradiction())
        elif final is None:
            return False
        elif (reason := finish_reason_of(final.end)) is None:
            self._fail(error_of(final))
        else:
            self.finish(reason, final.timings, now)
        return True

    def _finish(self, reason: "FinishReason.ValueType", row: RowTimings, now: float) -> None:
        if not self.delivery.withheld_by:
            self._note_shown(now)
        self.finished = self._finished_event(reason, row, now)
        self._move(StreamState.FINISHED)
        self.delivery.wake()

    def _fail(self, error: SluiceError) -> None:
        self.cascade.commit()
        self.error = error
        self._move(StreamState.FAILED)
        self.delivery.stop(error)

    def _cancel_row(self) -> None:
        if not self.row_ended:
            self._dispatch.cancel(self.current.row_id)

    def _restart(self, notice: Notice) -> None:
        if self.guards is not None:
            self.guards.checks.restart()
        self._row_end = None
        self._move(StreamState.PUBLISHING)
        self.delivery.restart(self.current, notice)

    def _check_answer(self) -> None:
        if self.guards is not None and not self.row_ended and not self.cascade.holding:
            self.guards.check_answer(self, ended=False)

    def _show_held_back(self, now: float) -> None:
        self._note_shown(now)
        self.delivery.show_held_back()

    def _note_shown(self, now: float) -> None:
        if self.first_token_at is None and self.current.transcript.visible.token_ids:
            self.first_token_at = now

    def _set_frame_arrived(self, *, with_tokens: bool, now: float) -> None:
        if self.first_frame_at is None:
            self.first_frame_at = now
        if with_tokens and self.state is not StreamState.STREAMING:
            self._move(StreamState.STREAMING)

    def _move(self, target: StreamState) -> None:
        assert target in LEGAL_MOVES[self.state], f"{self.state.name} to {target.name}"
        self.state = target

    def _finished_event(
        self, reason: "FinishReason.ValueType", row: RowTimings, now: float
    ) -> Finished:
        first_at = now if self.first_token_at is None else self.first_token_at
        withheld_by, transcript = self.delivery.withheld_by, self.current.transcript
        return Finished(
            reason=reason,
            usage=self.current.usage,
            timings=self.spec.timings.with_row(row, first_at, now),
            stop=("" if withheld_by else transcript.stop) or "",
            stop_token_id=(
                self.current.stop_token_id
                if reason == FINISH_REASON_STOP_SEQUENCE and not transcript.stop
                else None
            ),
            rules=withheld_by or transcript.blocked,
            model=self.current.model,
            attempts=[ModelUsage(model=one.model, usage=one.usage) for one in self.attempts],
        )


def _contradiction() -> SluiceError:
    """The tokens that the caller resumed with are not those that it would be shown now."""
    return InvalidRequest.of(
        "resume.token_ids",
        "are not the beginning of this answer: the model or the safety policy has changed since; "
        "ask again without resume",
    )
