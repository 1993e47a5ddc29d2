"""The answer to one request while it is computed: frames go in, messages with events come out.

An `AnswerStream` alone changes how far the answer is (`StreamState`), which model gives it, and how many of
the tokens are delivered. The text is that of its current run. A cascade, guard models and fallbacks decide too: see
`Steering`.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from typing_extensions import override

from gateway.identity.resume_token import ResumeToken
from gateway.safety.findings import Finding
from gateway.safety.guards.checks import Checks
from gateway.safety.output.windows import AnswerWindow
from gateway.streaming.model_run import (
    AcceptedFrame,
    ModelRun,
    ResultCollector,
    StreamState,
    contradiction,
)
from gateway.streaming.registry import Registry
from sluice.background import BackgroundTasks
from sluice.errors import Cancelled, SlowReader, SluiceError
from sluice.internal.v1.frame_pb2 import Frame, TaskTimings
from sluice.internal.v1.gateway_pb2 import KeyRecord, ReplacedModel, StoredAnswer
from sluice.v1 import inference_pb2 as pb
from sluice.wire.tokens import VisibleToken

_RECOVERED: Final = pb.Notice(
    kind=pb.NOTICE_KIND_RECOVERED, message="another process continues the answer at the same token"
)
_RECOVERED_INEXACTLY: Final = pb.Notice(
    kind=pb.NOTICE_KIND_RECOVERED,
    message="another process continues the answer at the same token; computed in bfloat16, the tokens from here on "
    "may differ from those of an undisturbed answer",
    inexact=True,
)
_CALLER_GONE: Final = Cancelled("the caller has gone")
_TAKEN_OVER: Final = "a newer call with the same idempotency key took over"


class AnsweredRequest(Protocol):
    """The request that an answer is for.

    Attributes:
        arrived_at: monotonic seconds.
        key: its idempotency key; empty without one.
        fingerprint: equal for equal requests.
        with_logprobs: whether callers get log-probabilities.
    """

    arrived_at: float
    key: str
    fingerprint: bytes
    with_logprobs: bool

    def timings(
        self, run: TaskTimings, queued_s: float, first_token_at: float, now: float
    ) -> pb.Timings:
        """Return the timings of an answer that ends `now`."""

    def started(self) -> pb.Started:
        """Return the first event of the answer, of the model that is asked first."""

    def resume_token(self, model: str) -> ResumeToken:
        """Return the resume token at the beginning of an answer of `model`."""


@dataclass
class Steering:
    """What may hold, replace or end an answer beside its run; by default nothing does.

    Attributes:
        is_held: whether nothing is shown before the commit point of a cascade.
        checks: of guard models, if the policy has any.
        next_run: called with each frame of the current run; returns the run of a cascade's second model, already sent,
            if that answers from now on, else None (`gateway.upstream.cascade`).
        check_answer: starts the checks that are due, now that the answer has grown or, if the flag is set, ended
            (`gateway.upstream.guards`).
        fall_back: starts to look for a model in place of the current run, which failed before anything of it was shown;
            returns False when there is none (`gateway.upstream.runs`).
    """

    is_held: bool = False
    checks: Checks | None = None
    next_run: "Callable[[AnswerStream, AcceptedFrame, float], ModelRun | None] | None" = None
    check_answer: "Callable[[AnswerStream, bool], None] | None" = None
    fall_back: "Callable[[AnswerStream, SluiceError], bool] | None" = None


class AnswerStream(ResultCollector):
    """The answer to one request while it is computed, and after its end.

    One call reads it at a time: the one that joined last. The number of its unread tokens is bounded. A call that had
    read all is not to blame for one large arrival (a catch-up after a loss, the part of an answer that existed when the
    call came), so only the tokens that come after that arrival count.

    Attributes:
        request: what it is for.
        finished: its last event, in state FINISHED.
        finished_at: monotonic seconds.
        first_token_at: when there was something to show for the first time, monotonic seconds.
        is_held: whether nothing is shown before the commit point of a cascade.
        checks: of guard models, if the policy has any.
        read_index: tokens of the current model that this call has read.
        notices: what a caller is told beside the answer, in order.
        withheld_by: the rules that keep the rest of the answer from every caller, if any do.
    """

    def __init__(
        self,
        registry: Registry,
        request: AnsweredRequest,
        first: ModelRun,
        on_end: Callable[["AnswerStream"], None] = lambda _: None,
        steering: Steering | None = None,
    ) -> None:
        """Wait for the answer of `first`, the run of the model that is asked first; the caller sends it.

        Args:
            registry: see `ResultCollector`; the key of the request is free there.
            request: what it is for.
            first: the run.
            on_end: called once with the stream, when it has ended and is forgotten.
            steering: what else decides about the answer.
        """
        super().__init__(registry, first, on_end)
        self.request, self.arrived_at = request, request.arrived_at
        if request.key:
            assert request.key not in registry.by_key, "the key is free"
            registry.by_key[request.key] = self
        self.finished: pb.Finished | None = None
        self.finished_at: float | None = None
        self.first_token_at: float | None = None
        self.withheld_by: tuple[str, ...] = ()
        steering = steering or Steering()
        self.is_held = steering.is_held
        self.checks = steering.checks
        self._next_run = steering.next_run
        """None once the current answer cannot be replaced by the cascade any more."""
        self._check_answer = steering.check_answer
        self._fall_back = steering.fall_back
        """None once the safety policy has chosen the model."""
        self._side_tasks: BackgroundTasks | None = None
        self.notices: list[pb.Notice] = []
        self._restart_notice = 0
        """Index of the notice with which the current model began."""
        self._end_index: int | None = None
        """Number of tokens that are ever delivered; None: all."""
        self._delivered = 0
        """The most tokens of the current model that a caller has been given."""
        self._resume_token: ResumeToken | None = None
        """Of the current model's answer; None: no caller was given any yet."""
        self._proven = 0
        """Tokens that the resume token stands for."""
        self._replaced: ModelRun | None = None
        """The run that failed, while a fallback for it is looked for."""
        self._end_reason: pb.FinishReason.ValueType | None = None
        """How the answer ends if no guard objects, in state CHECKING."""
        self._reader = 0
        """Number of the call that joined last."""
        self._wake: Callable[[], None] | None = None
        self._stop: Callable[[SluiceError], None] | None = None
        """How to reach the call that reads; None when it has gone."""
        self.read_index = 0
        self._read_notices = 0
        self._unread_max = 0
        self._burst = 0
        """Unread tokens that are not the reader's fault."""

    @property
    def is_read(self) -> bool:
        """Whether a call reads it."""
        return self._wake is not None

    @property
    def is_hidden(self) -> bool:
        """Whether nothing of the answer may be shown yet."""
        return self.is_held or (self.checks is not None and self.checks.holds)

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of its request."""
        return self.request.fingerprint

    def matches(self, held_ids: Sequence[VisibleToken], model: str) -> bool:
        """Return whether a caller's tokens of `model` begin the answer; those of a replaced model always match."""
        return self._was_replaced(model) or self.current.transcript.starts_with(held_ids)

    def _was_replaced(self, model: str) -> bool:
        """Return whether `model` gave the answer before another one took over."""
        if model in ("", self.current.model):
            return False
        return any(run.model == model for run in self.runs)

    def record(self) -> KeyRecord:
        """Return a complete answer to keep: all of it, as far as a caller may see it."""
        assert self.finished is not None, "only complete answers are kept"
        current, with_logprobs = self.current, self.request.with_logprobs
        delta, lengths = current.transcript.whole(with_logprobs, self._end_index)
        self._add_resume_token(delta)
        replaced = [
            ReplacedModel(model=run.model, prompt_tokens=run.prompt_tokens)
            for run in self.runs
            if run.model != current.model
        ]
        answer = StoredAnswer(
            started=self._started(current.model),
            delta=delta,
            text_lengths=lengths,
            notices=self.notices,
            restart_notice=self._restart_notice,
            replaced=replaced,
            finished=self.finished,
        )
        return KeyRecord(fingerprint=self.fingerprint, answer=answer)

    # The call that reads.

    def join(
        self,
        held_tokens: int,
        unread_max: int,
        wake: Callable[[], None],
        stop: Callable[[SluiceError], None] = lambda _: None,
        model: str = "",
    ) -> int:
        """Let a call read from now on, and return its number; the one that read ends with `Cancelled`.

        It begins at token `held_tokens` and skips all earlier notices. If another model took over from `model`, it
        begins with the notice of that, at token 0.

        Args:
            held_tokens: number of tokens that the caller has.
            unread_max: how many tokens may be unread.
            wake: called when there is something to read.
            stop: called with the error that ends the call, which may be waiting for a client that does not read.
            model: that gave the caller its tokens; empty: the current one.
        """
        if self._stop is not None:
            self._stop(Cancelled(_TAKEN_OVER))
        self._wake, self._stop, self._unread_max = wake, stop, unread_max
        self.read_index, self._read_notices = held_tokens, len(self.notices)
        if model and self._was_replaced(model):
            self.read_index, self._read_notices = 0, self._restart_notice
        self._burst = self.current.shown_tokens - self.read_index
        self._delivered = max(self._delivered, self.read_index)
        self._reader += 1
        return self._reader

    def leave(self, reader: int, error: SluiceError = _CALLER_GONE) -> None:
        """End with `error` if it was `reader` that read: without a reader the run is not needed any more."""
        if reader == self._reader and self.is_read:
            self._wake = self._stop = None
            self.fail(error)

    def started(self, reader: int, held_model: str) -> pb.Started | None:
        """Return the first event for a `reader` with tokens of `held_model`; None before a batcher has the task.

        Raises:
            SluiceError: see `read`.
        """
        self._raise_error(reader)
        return None if self.state is StreamState.PUBLISHING else self._started(held_model)

    def _started(self, model: str) -> pb.Started:
        started, run = self.request.started(), self.current
        if model != run.model:
            run = next((run for run in self.runs if run.model == model), run)
        started.model, started.prompt_tokens = run.model, run.prompt_tokens
        return started

    def text_before(self, index: int) -> str:
        """Return what callers see of the tokens before `index`."""
        return self.current.transcript.text_before(index) if index else ""

    def read(self, reader: int) -> pb.GenerateResponse | None:
        """Return the events that `reader` has not had, all unread tokens in one delta; None: it has had all it may see.

        Raises:
            SluiceError: the stream ended with it, or another call took over.
        """
        self._raise_error(reader)
        notices = self.notices[self._read_notices :]
        self._read_notices = len(self.notices)
        if self.is_hidden or (not self.current.shown_tokens and self.finished is None):
            return pb.GenerateResponse(notices=notices) if notices else None
        text, end = self.current.transcript, self._end_index
        with_tail = end is None and self.finished is not None
        delta = text.delta(self.read_index, self.request.with_logprobs, end, with_tail=with_tail)
        if delta is not None and delta.token_ids:
            self._add_resume_token(delta)
        self.read_index, self._burst = max(self.read_index, len(text.visible_ids[:end])), 0
        self._delivered = max(self._delivered, self.read_index)
        if delta is None and not notices and self.finished is None:
            return None
        return pb.GenerateResponse(notices=notices, delta=delta, finished=self.finished)

    def _raise_error(self, reader: int) -> None:
        if reader != self._reader:
            raise Cancelled(_TAKEN_OVER)
        if self.error is not None:
            raise self.error

    def _add_resume_token(self, delta: pb.Delta) -> None:
        """Add the token of the answer so far: every delta ends where the answer does, so it never has to go back."""
        if self._resume_token is None:
            self._resume_token = self.request.resume_token(self.current.model)
        end = delta.index + len(delta.token_ids)
        new = self.current.transcript.visible_ids[self._proven : end]
        delta.resume_token = self._resume_token.after(new)
        self._proven = end

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake()

    def _show_since(self, before: int) -> None:
        """Wake the reader because more than `before` tokens may be read; fail when too many are unread."""
        total = self.current.shown_tokens
        unread = total - self.read_index
        if self.read_index >= before:
            self._burst = total - before
        if self.is_read and unread - self._burst > self._unread_max:
            self.fail(
                SlowReader(
                    f"{unread} tokens are unread; read faster, or resume with those received"
                )
            )
        else:
            self._notify()

    # What batchers send.

    @override
    def accept_task(self, run_id: str) -> None:
        super().accept_task(run_id)
        self._notify()

    @override
    def accept(self, frame: Frame, now: float) -> None:
        run = self.current
        if frame.request_id != run.run_id:
            # Computed before its batcher learned that it is not needed: it is usage.
            self._run(frame.request_id).accept(frame, now)
            return
        if self.state is StreamState.CHECKING or run is self._replaced:
            return  # the run has ended: a repeated final frame
        # A reader is not to blame for tokens that it may not see yet.
        before = 0 if self.is_hidden else run.shown_tokens
        accepted = run.accept(frame, now)
        is_exact, is_resumed = run.settings.resumes_exactly, False
        if accepted.token_ids and self.state is not StreamState.STREAMING:
            self._move(StreamState.STREAMING)
            is_resumed = run.resumed > 0
        if accepted.is_recovered or (is_resumed and not is_exact):
            self.notices.append(_RECOVERED if is_exact else _RECOVERED_INEXACTLY)
        if self._next_run is not None:
            second = self._next_run(self, accepted, now)
            if second is not None:
                self._dispatch.release(run)
                self._switch_to(second)
                return
        if accepted.token_ids:
            self._note_shown(now)
        if self._end_with_run(now):
            self._dispatch.release(run)
            return
        if accepted.has_gap:
            self._dispatch.query(run)
        if self._check_answer is not None and not self.is_held:
            self._check_answer(self, False)
        if not self.is_hidden:
            self._show_since(before)

    @override
    def fail_run(self, run_id: str, error: SluiceError) -> None:
        if run_id != self.current.run_id or not self._falls_back(error):
            super().fail_run(run_id, error)

    @override
    def _end_with_run(self, now: float) -> bool:
        outcome = self.current.outcome
        if isinstance(outcome, SluiceError) and self._falls_back(outcome):
            return True
        return super()._end_with_run(now)

    # Which model answers.

    def _falls_back(self, error: SluiceError) -> bool:
        """Start to look for a fallback after `error`, if nothing was shown yet; return whether one is looked for."""
        run = self.current
        if self.has_ended or run is self._replaced:
            return not self.has_ended
        is_shown = run.shown_tokens and not self.is_hidden
        if self._fall_back is None or run.resumed or is_shown:
            return False
        if self._fall_back(self, error):
            self._replaced = run
        return run is self._replaced

    def replace_failed(self, failed: ModelRun, run: ModelRun, reason: str) -> bool:
        """Let `run` of a fallback answer, whose task must still be sent; return False when it is not wanted."""
        if self.has_ended or self.current is not failed:
            return False
        failed.escalation_reason = reason
        self._switch_to(run, degraded=True)
        return True

    def commit(self) -> None:
        """Keep the current answer: the cascade neither replaces it nor holds it back any more."""
        self._next_run, self.is_held = None, False

    def _switch_to(self, run: ModelRun, *, degraded: bool = False) -> None:
        """Let `run` give the answer; the previous answer is void. `degraded`: it is a fallback's."""
        previous = self.current
        self.commit()
        self.current = run
        self.runs.append(run)
        self._registry.by_run[run.run_id] = self
        self._delivered, self._proven, self._resume_token = 0, 0, None
        if self.checks is not None:
            self.checks.restart()
        self._end_reason = None
        self._move(StreamState.PUBLISHING)
        self._restart_notice = len(self.notices)
        self.notices.append(
            pb.Notice(
                kind=pb.NOTICE_KIND_ESCALATED,
                message=f"{run.model} answers instead of {previous.model}: {previous.escalation_reason}",
                model=run.model,
                degraded=degraded,
            )
        )
        self.read_index = 0
        self._notify()

    # What guards say. What comes after the end changes nothing.

    def reroute(self, run: ModelRun, reason: str) -> bool:
        """Let `run` of a governed model answer, whose task must still be sent; return False if the answer has ended."""
        if self.has_ended:
            return False
        self._cancel_run()
        self._fall_back = None
        self.current.escalation_reason = reason
        self._switch_to(run)
        return True

    def pass_verdict(self, now: float) -> None:
        """Show what may be shown after a guard's verdict, and end an answer that waited for that alone."""
        if self.has_ended:
            return
        if self._end_reason is not None and not self._waits_for_guards:
            self._close(self._end_reason, now)
        elif not self.is_hidden and self.is_read:
            self._note_shown(now)
            self._burst = self.current.shown_tokens - self.read_index
            self._notify()

    def settle(
        self, run: ModelRun, window: AnswerWindow, findings: Sequence[Finding], now: float
    ) -> None:
        """Apply what token classifiers found in `window` of a run, which may end the run; `pass_verdict` shows it."""
        if self.has_ended:
            return
        run.is_stopped |= run.transcript.settle(window, findings)
        if run is self.current and run.is_stopped and not self.has_run_ended:
            self._end_with_run(now)
            self._dispatch.release(run)

    def block(self, rules: tuple[str, ...], now: float) -> None:
        """End the answer because of `rules`: callers keep what was delivered, nothing else is shown."""
        if self.has_ended:
            return
        self._cancel_run()
        self.commit()
        self.withheld_by, self._end_index = rules, self._delivered
        self.current.transcript.close(truncated=True)
        self._finish(pb.FINISH_REASON_CONTENT_FILTER, now)

    @property
    def _waits_for_guards(self) -> bool:
        """Whether guard models must decide before the answer may end."""
        return self.checks is not None and (self.checks.waits or self.current.is_unread)

    # The end.

    @override
    def finish(self, reason: "pb.FinishReason.ValueType", now: float) -> None:
        """End complete, or with an error if the answer contradicts the caller's tokens; guards may delay that."""
        self.commit()
        current = self.current
        current.transcript.end()
        if self._check_answer is not None:
            if not current.is_unread:
                reason = current.close(reason)
            if not current.transcript.contradicted:
                self._check_answer(self, True)
                if self._waits_for_guards:
                    self._end_reason = reason
                    self._move(StreamState.CHECKING)
                    self._notify()
                    return
        self._close(reason, now)

    def _close(self, reason: "pb.FinishReason.ValueType", now: float) -> None:
        reason = self.current.close(reason)
        if self.current.transcript.contradicted:
            self._end(contradiction())
        else:
            self._finish(reason, now)

    def _finish(self, reason: "pb.FinishReason.ValueType", now: float) -> None:
        if not self.withheld_by:
            self._note_shown(now)
        first_at = now if self.first_token_at is None else self.first_token_at
        current, withheld_by = self.current, self.withheld_by
        transcript, stop_token_id = current.transcript, None
        if reason == pb.FINISH_REASON_STOP_SEQUENCE and not transcript.stop:
            stop_token_id = current.stop_token_id
        queued_s = sum(run.queued_s for run in self.runs)
        self.finished_at = now
        self.finished = pb.Finished(
            reason=reason,
            usage=current.usage,
            timings=self.request.timings(current.timings, queued_s, first_at, now),
            stop=("" if withheld_by else transcript.stop) or "",
            stop_token_id=stop_token_id,
            rules=withheld_by or transcript.blocked,
            model=current.model,
            attempts=[pb.ModelUsage(model=run.model, usage=run.usage) for run in self.runs],
        )
        self._notify()  # before what is recorded and learned at the end
        self._end(reason)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the answer; it is cancelled when that ends."""
        if self._side_tasks is None:
            self._side_tasks = BackgroundTasks()
        self._side_tasks.spawn(work)

    @override
    def _report_end(self) -> None:
        if self.error is not None and self._stop is not None:
            self._stop(self.error)
        # They refer to the caller's call, as `on_end` does.
        self._next_run = self._check_answer = self._fall_back = None
        if self._side_tasks is not None:
            self._side_tasks.cancel()
        if self.checks is not None:
            self.checks.close()
        if key := self.request.key:
            del self._registry.by_key[key]
            if self.finished_at is not None:
                self._registry.replays.put(key, self.record(), self.finished_at)
        super()._report_end()

    def _note_shown(self, now: float) -> None:
        if self.first_token_at is None and self.current.shown_tokens and not self.is_hidden:
            self.first_token_at = now
