"""One request that waits for its answer: frames go in, messages with events come out.

An `Answer` alone changes how far the answer is (`gateway.streaming.state`), which model gives it,
and how many of the tokens are delivered. The text is that of its current row.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Final, Protocol

from typing_extensions import override

from gateway.identity.resume_token import ResumeToken
from gateway.safety.findings import Finding
from gateway.safety.guards.checks import Checks
from gateway.safety.output.windows import AnswerWindow
from gateway.streaming.dispatch import Dispatch
from gateway.streaming.row import AcceptedFrame, Row, contradiction
from gateway.streaming.row_result import RowRequest, RowResult
from gateway.streaming.state import StreamState
from sluice.errors import Cancelled, SlowReader, SluiceError
from sluice.internal.v1.frame_pb2 import Frame, TaskTimings
from sluice.internal.v1.gateway_pb2 import KeyRecord, ReplacedModel, StoredAnswer
from sluice.v1.inference_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_STOP_SEQUENCE,
    NOTICE_KIND_ESCALATED,
    NOTICE_KIND_RECOVERED,
    Delta,
    Finished,
    FinishReason,
    GenerateResponse,
    ModelUsage,
    Notice,
    Started,
    Timings,
)
from sluice.wire.tokens import VisibleToken

_RECOVERED: Final = Notice(
    kind=NOTICE_KIND_RECOVERED, message="another process continues the answer at the same token"
)
_RECOVERED_INEXACTLY: Final = Notice(
    kind=NOTICE_KIND_RECOVERED,
    message="another process continues the answer at the same token; computed in bfloat16, the tokens from here on "
    "may differ from those of an undisturbed answer",
    inexact=True,
)
_GONE: Final = Cancelled("the caller has gone")


class AnsweredRequest(RowRequest, Protocol):
    """The request that an answer is for.

    Attributes:
        key: its idempotency key; empty without one.
        fingerprint: equal for equal requests.
        with_logprobs: whether callers get log-probabilities.
    """

    key: str
    fingerprint: bytes
    with_logprobs: bool

    def timings(self, row: TaskTimings, first_token_at: float, now: float) -> Timings:
        """The timings of an answer that ends ``now``."""

    def started(self) -> Started:
        """The first event of the answer, of the model that is asked first."""

    def resume_token(self, model: str) -> ResumeToken:
        """The resume token at the beginning of an answer of ``model``."""


class Reader:
    """The position of one call in an answer.

    The number of unread tokens is bounded by ``limit``. A single arrival that is larger than that (a catch-up after a
    loss, the part of an answer that existed when the call came) is not the reader's fault, so only tokens count that
    came after the arrival that found it idle.

    Attributes:
        index: tokens read so far.
        notices: notices read so far.
        wake: called when there is something to read.
        accepted: called when a batcher has the task, and nothing is to be read but that.
        stop: called with the error that ends the call, which may be waiting for a client that does not read.
        displaced_by: the error that ends this call although the answer may go on for another one.
    """

    def __init__(
        self,
        index: int,
        limit: int,
        wake: Callable[[], None],
        stop: Callable[[SluiceError], None] = lambda _: None,
        accepted: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = index
        self.notices = 0
        self.wake = wake
        self.stop = stop
        self.accepted = accepted
        self.displaced_by: SluiceError | None = None
        self._limit = limit
        self._burst = 0

    def grew(self, before: int, total: int) -> bool:
        """The answer grew from ``before`` to ``total`` tokens in one arrival; whether more than the limit is unread."""
        if self.index >= before:
            self._burst = total - before
        return total - self.index - self._burst > self._limit

    def displace(self, error: SluiceError) -> None:
        """The call ends with ``error``; another one reads instead."""
        self.displaced_by = error
        self.stop(error)

    def advance(self, total: int) -> None:
        """The call has read everything up to ``total``."""
        self.index = max(self.index, total)
        self._burst = 0


class SecondModel(Protocol):
    """The model to which one answer may escalate, and who decides that.

    Attributes:
        holds: nothing of the first answer is shown before its commit point.
        committed: the first answer is promised to the caller.
    """

    holds: bool
    committed: bool

    def next_row(self, row: Row, accepted: AcceptedFrame, now: float) -> Row | None:
        """Takes what ``row`` has given: the row of the second model where that answers from now on."""


class Fallback(Protocol):
    """Finds another model where the one that was asked fails before its first token."""

    def begin(self, answer: "Answer", error: SluiceError) -> bool:
        """Look for a model that answers in place of the current row; False: there is none."""


class Guards(Protocol):
    """The guard models that check the prompt and the answer of one request."""

    @property
    def checks(self) -> Checks:
        """Which checks are due, and their outcomes."""

    def check_answer(self, answer: "Answer", *, ended: bool) -> None:
        """The answer has grown, or ended: starts the checks that are due."""


class Answer(RowResult):
    """The answer to one request while it is computed, and after its end.

    Attributes:
        finished: how it ended, in state FINISHED.
        finished_at: when, seconds.
        first_token_at: when there was something to show for the first time, seconds.
        holding: nothing is shown before the commit point of a cascade.
        reader: the call that reads, or None when it has gone.
        withheld_by: the rules that keep the rest of the answer from every caller, if any do.
        guards: its checks, if the policy has guard models.
    """

    request: AnsweredRequest
    reader: Reader | None = None
    finished: Finished | None = None
    finished_at: float | None = None
    first_token_at: float | None = None
    withheld_by: tuple[str, ...] = ()
    _restart_notice = 0
    """Index of the notice with which the current model began."""
    _end_index: int | None = None
    """Number of tokens that are ever delivered; None: all."""
    _delivered = 0
    """The most tokens of the current model that a caller has been given."""
    _resume_token: ResumeToken | None = None
    """Of the current model's answer; None: no caller was given any yet."""
    _proven = 0
    """Tokens that the resume token stands for."""
    _failed: Row | None = None
    """The row that failed, while a fallback for it is looked for."""
    _row_end: "FinishReason.ValueType | None" = None
    """How the answer ends if no guard objects, in state CHECKING."""

    def __init__(
        self,
        request: AnsweredRequest,
        first: Row,
        dispatch: Dispatch,
        waiting: MutableMapping[str, RowResult],
        on_end: Callable[[], None],
        cascade: SecondModel | None = None,
        guards: Guards | None = None,
        fallback: Fallback | None = None,
    ) -> None:
        self._notices: list[Notice] = []
        super().__init__(request, first, dispatch, waiting, on_end)
        self._fallback = fallback
        """None once the safety policy has chosen the model."""
        self.holding = cascade is not None and cascade.holds
        self.guards = guards
        self._cascade = cascade
        """None once the current answer cannot be replaced by the cascade any more."""

    @property
    def hidden(self) -> bool:
        """Whether nothing of the answer may be shown yet."""
        return self.holding or (self.guards is not None and self.guards.checks.holds)

    def matches(self, held: Sequence[VisibleToken], model: str) -> bool:
        """Whether ``held``, tokens of ``model``, are the beginning of the answer, as far as a caller can know it."""
        return self.replaced(model) or self.current.transcript.starts_with(held)

    def replaced(self, model: str) -> bool:
        """Whether ``model`` gave the answer before another one took over."""
        if model in ("", self.current.model):
            return False
        return any(one.model == model for one in self.attempts)

    def record(self) -> KeyRecord:
        """What is kept of a complete answer: all of it, as far as a caller may see it."""
        assert self.finished is not None, "only complete answers are kept"
        current, with_logprobs = self.current, self.request.with_logprobs
        delta, lengths = current.transcript.whole(with_logprobs, self._end_index)
        self._add_resume_token(delta)
        replaced = [
            ReplacedModel(model=one.model, prompt_tokens=one.prompt_tokens)
            for one in self.attempts
            if one.model != current.model
        ]
        answer = StoredAnswer(
            started=self._started(current.model),
            delta=delta,
            text_lengths=lengths,
            notices=self._notices,
            restart_notice=self._restart_notice,
            replaced=replaced,
            finished=self.finished,
        )
        return KeyRecord(fingerprint=self.request.fingerprint, answer=answer)

    # Who reads it.

    def join(self, reader: Reader, model: str = "") -> None:
        """``reader`` reads from now on; the call that read ends with `Cancelled`.

        It holds tokens of ``model``, or of the current one when that is empty. It begins after the notices that it
        knows, or where another model took over.
        """
        previous, self.reader = self.reader, reader
        if previous is not None and previous is not reader:
            previous.displace(Cancelled("a newer call with the same idempotency key took over"))
        reader.notices = len(self._notices)
        if self.replaced(model):
            reader.index, reader.notices = 0, self._restart_notice
        reader.grew(reader.index, self.current.shown)
        self._delivered = max(self._delivered, reader.index)

    def leave(self, reader: Reader, error: SluiceError = _GONE) -> None:
        """The call of ``reader`` has ended. Without a reader the row is not needed any more: it ends with ``error``."""
        if self.reader is reader:
            self.reader = None
            self.fail(error)

    def started(self, reader: Reader, held_model: str) -> Started | None:
        """The first event for a ``reader`` that holds tokens of ``held_model``; None while the task is published.

        Raises:
            SluiceError: see `read`.
        """
        self._raise_error(reader)
        return None if self.state is StreamState.PUBLISHING else self._started(held_model)

    def _started(self, model: str) -> Started:
        started, row = self.request.started(), self.current
        if model != row.model:
            row = next((one for one in self.attempts if one.model == model), row)
        started.model, started.prompt_tokens = row.model, row.prompt_tokens
        return started

    def text_before(self, index: int) -> str:
        """What callers see of the tokens before ``index``."""
        return self.current.transcript.text_before(index) if index else ""

    def read(self, reader: Reader) -> GenerateResponse | None:
        """The events that ``reader`` has not had, all unread tokens in one delta; None: it has had all.

        Raises:
            SluiceError: the stream ended with it, or another call took over.
        """
        self._raise_error(reader)
        notices = self._notices[reader.notices :]
        reader.notices = len(self._notices)
        if self.hidden or (not self.current.shown and self.finished is None):
            return GenerateResponse(notices=notices) if notices else None
        text, end = self.current.transcript, self._end_index
        with_tail = end is None and self.finished is not None
        delta = text.delta(reader.index, self.request.with_logprobs, end, with_tail=with_tail)
        if delta is not None and delta.token_ids:
            self._add_resume_token(delta)
        reader.advance(len(text.visible_ids[:end]))
        self._delivered = max(self._delivered, reader.index)
        if delta is None and not notices and self.finished is None:
            return None
        return GenerateResponse(notices=notices, delta=delta, finished=self.finished)

    def _raise_error(self, reader: Reader) -> None:
        error = reader.displaced_by or self.error
        if error is not None:
            raise error

    def _add_resume_token(self, delta: Delta) -> None:
        """Every delta ends where the answer ends so far, so the token never has to go back."""
        if self._resume_token is None:
            self._resume_token = self.request.resume_token(self.current.model)
        end = delta.index + len(delta.token_ids)
        new = self.current.transcript.visible_ids[self._proven : end]
        delta.resume_token = self._resume_token.after(new)
        self._proven = end

    def _wake(self) -> None:
        if self.reader is not None:
            self.reader.wake()

    def _show_since(self, before: int, now: float) -> None:
        """More than ``before`` tokens may be read: wakes the reader, or fails when too many are unread."""
        total, reader = self.current.shown, self.reader
        if reader is None:
            return
        if not reader.grew(before, total):
            if before:
                self._dispatch.wake(reader.wake, self.current.row_id, now)
            else:
                reader.wake()
            return
        unread = total - reader.index
        self.fail(
            SlowReader(f"{unread} tokens are unread; read faster, or resume with those received")
        )

    # What batchers say.

    @override
    def published(self, row_id: str) -> None:
        super().published(row_id)
        if self.reader is not None:
            self.reader.accepted()

    @override
    def accept(self, frame: Frame, now: float) -> None:
        row = self.current
        if frame.request_id != row.row_id:
            # Computed before its batcher learned that it is not needed: it is usage.
            next(one for one in self.attempts if one.row_id == frame.request_id).accept(frame, now)
            return
        if self.state is StreamState.CHECKING or row is self._failed:
            return  # the row has ended: a repeated final frame
        # A reader is not to blame for tokens that it may not see yet.
        before = 0 if self.hidden else row.shown
        accepted = row.accept(frame, now)
        exact, resumed = row.settings.resumes_exactly, False
        if accepted.token_ids and self.state is not StreamState.STREAMING:
            self._move(StreamState.STREAMING)
            resumed = row.resumed > 0
        if accepted.recovered or (resumed and not exact):
            self._notices.append(_RECOVERED if exact else _RECOVERED_INEXACTLY)
        if self._cascade is not None:
            second = self._cascade.next_row(row, accepted, now)
            if second is not None:
                self._dispatch.release(row)
                self._switch_to(second)
                return
            if self._cascade.committed:
                self.commit()
        if accepted.token_ids and self.first_token_at is None and not self.hidden:
            self._note_shown(now)
        if self._end_with_row(now):
            self._dispatch.release(row)
            return
        if accepted.gap:
            self._dispatch.ask(row.row_id)
        if self.guards is not None and not self.holding:
            self.guards.check_answer(self, ended=False)
        if not self.hidden:
            self._show_since(before, now)

    @override
    def row_failed(self, row_id: str, error: SluiceError) -> None:
        if row_id != self.current.row_id or not self._falls_back(error):
            super().row_failed(row_id, error)

    @override
    def _end_with_row(self, now: float) -> bool:
        outcome = self.current.outcome()
        if isinstance(outcome, SluiceError) and self._falls_back(outcome):
            return True
        return super()._end_with_row(now)

    # Which model answers.

    def _falls_back(self, error: SluiceError) -> bool:
        """Whether a fallback is looked for after ``error``: nothing of the answer has been shown."""
        row = self.current
        if self.ended or row is self._failed:
            return not self.ended
        if self._fallback is None or row.resumed or (row.shown and not self.hidden):
            return False
        if self._fallback.begin(self, error):
            self._failed = row
        return row is self._failed

    def fall_back(self, failed: Row, row: Row, reason: str) -> bool:
        """A fallback gives the answer with ``row``, whose task must still be sent; False: it is not wanted any more."""
        if self.ended or self.current is not failed:
            return False
        failed.escalation_reason = reason
        self._switch_to(row, degraded=True)
        return True

    def commit(self) -> None:
        """The current answer stays."""
        self._cascade, self.holding = None, False

    def _switch_to(self, row: Row, *, degraded: bool = False) -> None:
        """``row`` gives the answer from now on; the previous answer is void. ``degraded``: it is a fallback's."""
        previous = self.current
        self.commit()
        self._add(row)
        self._delivered, self._proven, self._resume_token = 0, 0, None
        if self.guards is not None:
            self.guards.checks.restart()
        self._row_end = None
        self._move(StreamState.PUBLISHING)
        self._restart_notice = len(self._notices)
        self._notices.append(
            Notice(
                kind=NOTICE_KIND_ESCALATED,
                message=f"{row.model} answers instead of {previous.model}: {previous.escalation_reason}",
                model=row.model,
                degraded=degraded,
            )
        )
        if self.reader is not None:
            self.reader.index = 0
        self._wake()

    # What guards say. What comes after the end changes nothing.

    def reroute(self, row: Row, reason: str) -> bool:
        """A governed model gives the answer with ``row``, whose task must still be sent; False: it has ended."""
        if self.ended:
            return False
        self._cancel_row()
        self._fallback = None
        self.current.escalation_reason = reason
        self._switch_to(row)
        return True

    def verdict_passed(self, now: float) -> None:
        """A guard lets the answer go on: shows and ends what waited for its verdict alone."""
        if self.ended:
            return
        if self._row_end is not None and not self._waits:
            self._close(self._row_end, now)
        elif not self.hidden and self.reader is not None:
            self._note_shown(now)
            self.reader.grew(self.reader.index, self.current.shown)
            self.reader.wake()

    def settle(
        self, row: Row, window: AnswerWindow, findings: Sequence[Finding], now: float
    ) -> None:
        """Token classifiers have read ``window`` of what ``row`` answers; `verdict_passed` shows it."""
        if self.ended:
            return
        row.settle(window, findings)
        if row is self.current and row.stopped and not self.row_ended:
            self._end_with_row(now)
            self._dispatch.release(row)

    def block(self, rules: tuple[str, ...], now: float) -> None:
        """A guard ends the answer: callers keep what was delivered, nothing else is shown."""
        if self.ended:
            return
        self._cancel_row()
        self.commit()
        self.withheld_by, self._end_index = rules, self._delivered
        self.current.transcript.close(truncated=True)
        self._finish(FINISH_REASON_CONTENT_FILTER, now)

    @property
    def _waits(self) -> bool:
        """Whether guard models have something to say before the answer may end."""
        return self.guards is not None and (self.guards.checks.waits or self.current.unread)

    # The end.

    @override
    def finish(self, reason: "FinishReason.ValueType", now: float) -> None:
        """Ends with the answer complete, or with an error when it is not what the caller holds."""
        self.commit()
        current = self.current
        current.transcript.end()
        if self.guards is not None:
            if not current.unread:
                reason = current.close(reason)
            if not current.transcript.contradicted:
                self.guards.check_answer(self, ended=True)
                if self._waits:
                    self._row_end = reason
                    self._move(StreamState.CHECKING)
                    self._wake()
                    return
        self._close(reason, now)

    def _close(self, reason: "FinishReason.ValueType", now: float) -> None:
        reason = self.current.close(reason)
        if self.current.transcript.contradicted:
            self._end(contradiction())
        else:
            self._finish(reason, now)

    def _finish(self, reason: "FinishReason.ValueType", now: float) -> None:
        if not self.withheld_by:
            self._note_shown(now)
        self.finished, self.finished_at = self._finished_event(reason, now), now
        self._wake()  # before what is recorded and learned at the end
        self._end(reason)

    @override
    def _end(self, outcome: "FinishReason.ValueType | SluiceError") -> None:
        if isinstance(outcome, SluiceError) and self.reader is not None:
            self.reader.stop(outcome)
        super()._end(outcome)

    def _note_shown(self, now: float) -> None:
        if self.first_token_at is None and self.current.shown:
            self.first_token_at = now

    def _finished_event(self, reason: "FinishReason.ValueType", now: float) -> Finished:
        first_at = now if self.first_token_at is None else self.first_token_at
        withheld_by, transcript = self.withheld_by, self.current.transcript
        return Finished(
            reason=reason,
            usage=self.current.usage,
            timings=self.request.timings(self.current.timings, first_at, now),
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
