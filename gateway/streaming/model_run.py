"""A run: one model's work on an answer, from its task until its end; and what collects its result.

`Dispatch` sends the task and recovers the run when its batcher or worker is lost. A `ResultCollector` registers itself
when it begins, and removes itself with its end. It passes the frames to `ModelRun.accept`, which puts them in order by
these rules (docs/internals/wire.md, Frames); the run has `next_index` tokens:

1. A frame of another attempt than `attempt_number` comes from an earlier owner of the run: dropped.
2. A frame that ends at or below `next_index` and is not final is a duplicate: dropped.
3. A frame that begins below and ends above loses the tokens that are known.
4. A frame that begins above is a gap: it is dropped, and the missing frames are requested, once until `next_index`
   moves or `stall_s` passes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gateway.routing.router import price_of
from gateway.safety.output.filter import OutputFilter
from gateway.safety.output.windows import AnswerWindow
from gateway.streaming.transcript import Transcript
from sluice import errors
from sluice.errors import RETRY_AFTER_S, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.frame_pb2 import Frame, Logprobs
from sluice.internal.v1.task_pb2 import Task
from sluice.settings.models import ModelSettings
from sluice.v1 import inference_pb2 as pb
from sluice.wire.subjects import BULK_CLASS, URGENT_CLASS

if TYPE_CHECKING:
    from gateway.streaming.registry import Registry

logger = logging.getLogger(__name__)

_REASONS: Final[Mapping[int, "pb.FinishReason.ValueType"]] = {
    frame_pb2.TASK_END_STOP: pb.FINISH_REASON_STOP,
    frame_pb2.TASK_END_LENGTH: pb.FINISH_REASON_LENGTH,
}

OpenTranscript = Callable[[], Transcript]
"""Make the text of an answer, and with it the output filter."""


class RunClass(NamedTuple):
    """The priority class of a model: its runs wait in one queue, and share the capacity that batchers grant."""

    model: str
    priority_class: str


@lru_cache(maxsize=1024)
def run_class_of(model: str, priority_class: str) -> RunClass:
    """Return the one object that all runs of a class of a model share."""
    return RunClass(model, priority_class)


@dataclass(slots=True)
class AcceptedFrame:
    """The new part of a frame."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()
    has_gap: bool = False
    """Whether frames before this one are missing and must be requested."""
    is_recovered: bool = False
    """Whether it is the first frame of a later attempt: another process continues the run."""


_NOTHING_NEW: Final = AcceptedFrame()
RELEASED: Final = Task()
"""The task of a run that has ended, which is not sent any more: tasks take memory."""


@dataclass(eq=False, slots=True)
class ModelRun:
    """One model's work on an answer, or on the numbers that a text is worth.

    Attributes:
        task: the message to a batcher, as sent last; empty once the run has ended, because of its size.
        model: name in the catalogue; the task may name it otherwise.
        settings: of the model, for its prices.
        prompt_tokens: in tokens of this model; 0 where another answer counts them.
        open_transcript: makes the text of its tokens when the first arrives: thousands of runs may wait for one.
            None: its result is numbers.
        deadline: monotonic seconds.
        stall_s: missing frames are requested again after this time, seconds.
        sent_at: when it was given to `Dispatch`, monotonic seconds; before that, when it was made.
        stop_token_ids: the caller's; they end the answer like the model's own.
        resumed: tokens that the caller brought.
        headers: of the task's message: the trace context.
        is_urgent: whether a person waits for it: it needs no capacity, and its frames are taken first.
        is_bulk: whether it may wait for others to leave with it, where nobody reads parts of its answer.

        attempt_number: how often it was sent again; frames of other attempts are dropped.
        is_sent: whether it was sent; not when the caller had the whole answer already.
        is_queued: whether it waits in this gateway until a batcher has capacity.
        queued_at: when that began last, monotonic seconds.
        queued_s: how long it waited before it was sent for the first time, seconds.
        batcher: that has it; empty: none.
        is_accepted: whether that batcher has confirmed the task.
        was_accepted: whether any batcher has: only then is anything computed, and it waits until its deadline.
        needs_capacity: whether it needs capacity; not once it was sent, unless a batcher that had none returned it.
        capacity_at: the batcher whose capacity it uses; empty: none.
        task_bytes: size of the task.
        check_at: when to query it, or to try again, monotonic seconds.
        queries: sent since the batcher's last word about it.
        queried_at: when the first of them was sent, monotonic seconds.
        survived_query: whether its batcher has answered one since it was sent: the run does not kill batchers.
        tokens_when_sent: tokens that it had when it was sent last.
        losses: batchers and workers that were lost with it, in succession and without a new token.

        next_index: number of tokens that have arrived.
        accepted_attempt: that of the last frame that was accepted; -1: none was.
        last_token_at: when tokens or numbers arrived last, monotonic seconds.
        recoveries: how often another process continued it.
        recovered_gap_s: the longest time without a token because of that, seconds.
        recovered_from: what was lost when another process continued it last: "worker" or "batcher".

        final: the batcher's word on its end; None: it goes on.
        is_stopped: whether a stop string or the safety policy ended the answer; the run itself may go on.
        escalation_reason: why another model answers instead; empty for the last run of an answer.
        kept_reason: why the answer was kept although in doubt.
        error: why it failed, where a fallback answers instead: it costs nothing.
        hint_tokens: tokens of the prompt that show the draft of a cascade's first model.
        hint_dropped: why there are none, where the policy wants them.
        expected_s: predicted duration when it was sent, seconds; 0: unknown.
    """

    task: Task
    model: str
    settings: ModelSettings
    prompt_tokens: int
    open_transcript: OpenTranscript | None
    deadline: float
    stall_s: float
    sent_at: float
    stop_token_ids: frozenset[int] = frozenset()
    resumed: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    run_id: str = field(init=False)
    run_class: RunClass = field(init=False)
    is_urgent: bool = field(init=False)
    is_bulk: bool = field(init=False)
    # Where it is. `Dispatch` changes it; others set `is_sent` and `was_accepted`, and `ChunkRuns` its own attempts.
    attempt_number: int = 0
    is_sent: bool = False
    is_queued: bool = False
    queued_at: float = 0.0
    queued_s: float = 0.0
    batcher: str = ""
    is_accepted: bool = False
    was_accepted: bool = False
    needs_capacity: bool = True
    capacity_at: str = ""
    task_bytes: int = 0
    check_at: float = 0.0
    queries: int = 0
    queried_at: float = 0.0
    survived_query: bool = False
    tokens_when_sent: int = 0
    losses: int = 0
    # What has arrived.
    next_index: int = 0
    accepted_attempt: int = -1
    last_token_at: float = -inf
    recoveries: int = 0
    recovered_gap_s: float = 0.0
    recovered_from: str = ""
    _transcript: Transcript | None = None
    _requested_at: float | None = None
    _lost: str = "worker"
    # How it ended.
    final: frame_pb2.Final | None = None
    is_stopped: bool = False
    escalation_reason: str = ""
    kept_reason: str = ""
    error: SluiceError | None = None
    # For records.
    hint_tokens: int = 0
    hint_dropped: str = ""
    expected_s: float = 0.0

    def __post_init__(self) -> None:
        self.run_id = self.task.request_id
        self.run_class = run_class_of(self.task.model, self.task.priority_class)
        self.is_urgent = self.task.priority_class == URGENT_CLASS
        self.is_bulk = self.task.priority_class == BULK_CLASS

    # What has arrived.

    @property
    def transcript(self) -> Transcript:
        """The text of its tokens."""
        if self._transcript is None:
            assert self.open_transcript is not None, "its result is numbers"
            self._transcript = self.open_transcript()
        return self._transcript

    @property
    def output(self) -> OutputFilter | None:
        """The output filter, if the policy has one and a token has arrived."""
        return None if self._transcript is None else self._transcript.output

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of the answer so far, as the model gave them."""
        return () if self._transcript is None else self._transcript.token_ids

    @property
    def shown_tokens(self) -> int:
        """Number of tokens of the answer that callers may see, hidden ones among them."""
        return 0 if self._transcript is None else len(self._transcript.visible_ids)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens of the answer so far."""
        return 0 if self._transcript is None else len(self._transcript.token_ids)

    @property
    def raw_text(self) -> str:
        """The answer so far as the model gave it: with placeholders, before the output filter."""
        return self.transcript.text if self.output is None else self.output.raw

    @property
    def is_unread(self) -> bool:
        """Whether token classifiers have to read more of the answer."""
        return self.output is not None and self.output.unread

    def next_window(self) -> AnswerWindow | None:
        """Return the next part for token classifiers, if there is one to read now."""
        if self.output is None or self.output.windows is None or not self.is_unread:
            return None
        return self.output.windows.due()

    @property
    def stop_token_id(self) -> int | None:
        """The caller's stop token that ended the answer, if one did."""
        last = self.token_ids[-1:]
        return last[0] if last and last[0] in self.stop_token_ids else None

    def accept(self, frame: Frame, now: float) -> AcceptedFrame:
        """Add what is new in `frame`, by the rules of this module."""
        accepted = self._new_part(frame, now)
        if accepted.token_ids and self.open_transcript is not None:
            transcript, logprobs = self.transcript, accepted.logprobs
            was_closed = transcript.closed
            for position, token_id in enumerate(accepted.token_ids):
                # A stop string or the filter may end the text before the tokens end.
                if transcript.closed:
                    break
                has_logprobs = position < len(logprobs)
                transcript.append(token_id, logprobs[position] if has_logprobs else None)
            self.is_stopped |= transcript.closed and not was_closed
        return accepted

    def _new_part(self, frame: Frame, now: float) -> AcceptedFrame:
        if frame.attempt != self.attempt_number:  # rule 1
            return _NOTHING_NEW
        is_recovered = self.attempt_number > self.accepted_attempt >= 0
        if is_recovered:
            self.recoveries += 1
            self.recovered_from = self._lost
            gap_s = now - max(self.last_token_at, self.sent_at)
            self.recovered_gap_s = max(self.recovered_gap_s, gap_s)
        self.accepted_attempt = self.attempt_number
        self.was_accepted = True
        if frame.start_index > self.next_index:  # rule 4
            return AcceptedFrame(has_gap=self._requests_gap(now), is_recovered=is_recovered)
        duplicates = self.next_index - frame.start_index  # rules 2 and 3
        token_ids = frame.token_ids[duplicates:]
        if frame.final.values:
            self.last_token_at = now
        if token_ids:
            self.next_index += len(token_ids)
            self._requested_at, self.last_token_at = None, now
        if frame.HasField("final"):
            self.final = frame.final
        return AcceptedFrame(token_ids, frame.logprobs[duplicates:], is_recovered=is_recovered)

    def _requests_gap(self, now: float) -> bool:
        if self._requested_at is not None and now - self._requested_at < self.stall_s:
            return False
        self._requested_at = now
        return True

    # Where it is.

    def start_attempt(self, lost: str) -> None:
        """Drop the frames of all attempts so far, because the "worker" or "batcher" was `lost`."""
        self.attempt_number += 1
        self.task.attempt = self.attempt_number
        self._requested_at, self._lost = None, lost

    @property
    def current_losses(self) -> int:
        """`losses`, or 0 when a token has come since it was sent last."""
        return self.losses if self.completion_tokens == self.tokens_when_sent else 0

    # How it ended, and what it cost.

    @property
    def outcome(self) -> "pb.FinishReason.ValueType | SluiceError | None":
        """Why the answer is complete, or why there is none; None while the run goes on."""
        if self.is_stopped:
            return pb.FINISH_REASON_STOP_SEQUENCE
        if self._transcript is not None and self._transcript.contradicted:
            return contradiction()
        if self.final is None:
            return None
        return finish_reason_of(self.final.end) or error_of(self.final)

    def close(self, reason: "pb.FinishReason.ValueType") -> "pb.FinishReason.ValueType":
        """Close the text of a run that ended with `reason`, and return why the answer ended."""
        if self.open_transcript is None:
            return reason
        self.transcript.close(truncated=reason != pb.FINISH_REASON_STOP)
        # The text that was held back may have completed a stop string or a match of the filter.
        if self.transcript.stop is not None:
            return pb.FINISH_REASON_STOP_SEQUENCE
        if self.transcript.blocked:
            return pb.FINISH_REASON_CONTENT_FILTER
        has_stopped = reason == pb.FINISH_REASON_STOP and self.stop_token_id is not None
        return pb.FINISH_REASON_STOP_SEQUENCE if has_stopped else reason

    def given_up_at(self, now: float) -> float:
        """Return when a run that another one replaced was given up: with its last token, if it had one."""
        return min(now, max(self.last_token_at, self.sent_at))

    @property
    def timings(self) -> frame_pb2.TaskTimings:
        """Duration of its steps; empty until it has ended."""
        return frame_pb2.TaskTimings() if self.final is None else self.final.timings

    @property
    def server_tokens(self) -> frame_pb2.ServerTokens | None:
        """The tokens as the server that computed the run bills them, where there is one that says it."""
        if self.final is None or not self.final.HasField("server_tokens"):
            return None
        return self.final.server_tokens

    @property
    def usage(self) -> pb.Usage:
        """Tokens of prompt and answer, as the server that computed them counts where there is one that says it."""
        prompt_tokens, completion_tokens = self.prompt_tokens, self.completion_tokens
        if (counted := self.server_tokens) is not None:
            # Of several answers to a prompt only one counts it.
            prompt_tokens = counted.prompt_tokens if prompt_tokens else 0
            completion_tokens = counted.completion_tokens
        cached = min(prompt_tokens, self.final.cached_prompt_tokens) if self.final else 0
        return pb.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_prompt_tokens=cached,
            resumed_tokens=min(self.resumed, completion_tokens),
        )

    @property
    def billed_tokens(self) -> tuple[int, int]:
        """Tokens of prompt and answer to pay for: none that the caller brought, none if a fallback answers."""
        if not self.was_accepted or self.error is not None:
            return 0, 0
        if (counted := self.server_tokens) is not None:
            return counted.prompt_tokens, counted.completion_tokens
        return self.prompt_tokens, max(0, self.completion_tokens - self.resumed)

    @property
    def cost(self) -> float:
        """Price of its tokens so far."""
        return price_of(self.settings, *self.billed_tokens)


class StreamState(Enum):
    """How far a result is; only the result itself changes it.

    Frames, even the last one, may arrive before the batcher's word that it has the task.
    """

    PUBLISHING = auto()
    """The task is on its way to a batcher."""
    WAITING = auto()
    """A batcher has the task; no frame has arrived yet."""
    STREAMING = auto()
    """Frames arrive."""
    CHECKING = auto()
    """The run has ended; the answer waits for the verdicts of guards."""
    FINISHED = auto()
    """The answer is complete."""
    FAILED = auto()
    """It ended with an error: the caller left, the deadline passed, the engine failed."""


ENDED: Final = frozenset({StreamState.FINISHED, StreamState.FAILED})


class ResultCollector:
    """Collects the result of a run: an embedding, a guard's verdict, a shadow, a chunk of audio.

    Attributes:
        request_id: its name, which is that of its first run.
        tenant: whose it is.
        arrived_at: when its run was made; of an `AnswerStream`, when its request came; monotonic seconds.
        state: how far it is.
        error: why it failed, in state FAILED.
        reason: why it is complete, in state FINISHED.
        runs: that worked on it, in the order in which they began.
        current: the last of them, whose result it is.
    """

    def __init__(
        self,
        registry: "Registry",
        run: ModelRun,
        on_end: Callable[[Any], object] = lambda _: None,
    ) -> None:
        """Wait for the result of a run.

        Args:
            registry: passes it what batchers send.
            run: which is sent next.
            on_end: called once with this result, when it has ended and is forgotten.
        """
        self.state = StreamState.PUBLISHING
        self.error: SluiceError | None = None
        self.reason: pb.FinishReason.ValueType | None = None
        self.request_id, self.tenant = run.run_id, run.task.tenant
        self.arrived_at = run.sent_at
        self.current = run
        self.runs = [run]
        self._registry = registry
        self._dispatch = registry.dispatch
        self._on_end = on_end
        assert run.run_id not in registry.by_run, "run ids are unique"
        registry.by_run[run.run_id] = self

    @property
    def has_ended(self) -> bool:
        """Whether it is complete or failed."""
        return self.state in ENDED

    @property
    def was_accepted(self) -> bool:
        """Whether a batcher had any of its runs: only then was something computed."""
        return any(run.was_accepted for run in self.runs)

    @property
    def has_run_ended(self) -> bool:
        """Whether no run is computed for it any more."""
        return self.has_ended or self.state is StreamState.CHECKING

    def accept_task(self, run_id: str) -> None:
        """Note that a batcher has the task of a run."""
        run = self._run(run_id)
        run.was_accepted = True
        if run is self.current and self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)

    def _run(self, run_id: str) -> ModelRun:
        return next(run for run in self.runs if run.run_id == run_id)

    def fail_run(self, run_id: str, error: SluiceError) -> None:
        """End with `error` because a run cannot be answered, if it is the current one."""
        if run_id == self.current.run_id:
            self.fail(error)

    def accept(self, frame: Frame, now: float) -> None:
        """Add what is new in `frame`."""
        run = self.current
        accepted = run.accept(frame, now)
        if accepted.token_ids and self.state is not StreamState.STREAMING:
            self._move(StreamState.STREAMING)
        if self._end_with_run(now):
            self._dispatch.release(run)
        elif accepted.has_gap:
            self._dispatch.query(run)

    def _end_with_run(self, now: float) -> bool:
        """End if the current run has ended, and return whether it has."""
        outcome = self.current.outcome
        if isinstance(outcome, SluiceError):
            self._end(outcome)
        elif outcome is not None:
            self.finish(outcome, now)
        return outcome is not None

    def finish(self, reason: "pb.FinishReason.ValueType", now: float) -> None:
        """End complete: the run ended with `reason`."""
        self._end(self.current.close(reason))

    def fail(self, error: SluiceError) -> None:
        """Cancel the run and end with `error`, unless it has ended."""
        if not self.has_ended:
            self._cancel_run()
            self._end(error)

    def _cancel_run(self) -> None:
        if not self.has_run_ended:
            self._dispatch.release(self.current)

    def _end(self, outcome: "pb.FinishReason.ValueType | SluiceError") -> None:
        if isinstance(outcome, SluiceError):
            self.error = outcome
            self._move(StreamState.FAILED)
        else:
            self.reason = outcome
            self._move(StreamState.FINISHED)
        for run in self.runs:
            del self._registry.by_run[run.run_id]
        try:
            self._report_end()
        except Exception:  # what observes one request must not stop the frames of all others
            logger.exception("recording the end of request %s failed", self.request_id)

    def _report_end(self) -> None:
        # It refers to the caller's call, which refers to this: without a circle no garbage collection is needed.
        on_end = self._on_end
        del self._on_end
        on_end(self)

    def _move(self, target: StreamState) -> None:
        assert not self.has_ended, "an end is final"
        self.state = target


def finish_reason_of(end: "frame_pb2.TaskEnd.ValueType") -> "pb.FinishReason.ValueType | None":
    """Return the reason of a complete answer; None when `end` is an error."""
    return _REASONS.get(end)


def contradiction() -> SluiceError:
    """Return the error for a caller who resumes with other tokens than those that it would be shown now."""
    return errors.InvalidRequest.of(
        "resume.token_ids",
        "are not the beginning of this answer: the model or the safety policy has changed since; "
        "ask again without resume",
    )


def error_of(final: frame_pb2.Final) -> SluiceError:
    """Return the public error of a run that ended with one."""
    if final.end == frame_pb2.TASK_END_DEADLINE:
        return errors.DeadlinePassed("the deadline passed before the answer was complete")
    if final.end == frame_pb2.TASK_END_CANCELLED:
        return errors.Cancelled("the request was cancelled")
    message = final.error.message or "the run ended without an answer"
    if final.error.field:  # the caller's fault
        return errors.InvalidRequest.of(final.error.field, message)
    kind = errors.BY_REASON.get(final.error.reason)
    if kind is errors.PromptTooLong:
        return kind(message, violations=[errors.FieldViolation("input", message)])
    if kind is None:
        is_refused = final.end == frame_pb2.TASK_END_REFUSED
        kind = errors.Overloaded if is_refused else errors.EngineFailed
    is_retryable = kind.code in (errors.Overloaded.code, errors.ModelUnavailable.code)
    return kind(
        message,
        retry_after_s=(final.error.retry_after_s or RETRY_AFTER_S) if is_retryable else None,
    )
