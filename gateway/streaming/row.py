"""A row: one model's attempt at an answer, the tokens that arrived, and how it ended.

Its frames are put in order by these rules (docs/internals/wire.md, Frames); it holds ``next_index`` tokens:

- A frame of a lower attempt than the highest seen comes from an earlier owner of the row: dropped.
- A frame that ends at or below ``next_index`` and is not final is a duplicate: dropped.
- A frame that begins below and ends above loses the head that is known.
- A frame that begins above is a gap: it is dropped, and the missing frames are requested, once until ``next_index``
  moves or ``stall_s`` passes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from gateway.safety.findings import Finding
from gateway.safety.output.filter import OutputFilter
from gateway.safety.output.windows import AnswerWindow
from gateway.streaming.transcript import Transcript
from sluice import errors
from sluice.errors import RETRY_AFTER_S, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.frame_pb2 import Frame, Logprobs
from sluice.settings.models import ModelSettings
from sluice.v1.inference_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_STOP_SEQUENCE,
    FinishReason,
    Usage,
)

_REASONS: Final[Mapping[int, "FinishReason.ValueType"]] = {
    frame_pb2.TASK_END_STOP: FINISH_REASON_STOP,
    frame_pb2.TASK_END_LENGTH: FINISH_REASON_LENGTH,
}

OpenText = Callable[[], Transcript]
"""Makes the text of an answer, and what inspects it: its filter is in the text."""


@dataclass
class AcceptedFrame:
    """What was new in a frame."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()
    gap: bool = False
    """Set when frames before this one are missing and must be requested."""
    recovered: bool = False
    """The first frame of a later attempt: another process continues the row."""


_NOTHING_NEW: Final = AcceptedFrame()


@dataclass(eq=False)
class Row:
    """A row that computes an answer, or numbers.

    Attributes:
        row_id: names the row in tasks and frames; that of the first attempt is the request id.
        prompt_tokens: in this model's tokens; 0 where another answer counts them.
        open_text: makes the text of its tokens, with the first of them: thousands of rows may wait for one. None: its
            result is numbers.
        stall_s: missing frames are requested again after this time, seconds.
        sent_at: when the row was sent, seconds.
        settings: of the model, for its prices.
        stop_token_ids: the caller's; they end the answer beside the model's own.
        resumed: tokens that the caller brought.
        sent: its task was sent; not when the caller held the whole answer.
        taken: its task is known to be with the batchers: only then is anything computed.
        final: how the row ended; None until it has.
        stopped: a stop string or the safety policy ended the answer; the row itself may go on.
        escalation_reason: why another model answers instead; empty for the last attempt.
        error: why it failed, where a fallback answers instead: it costs nothing.
        kept_reason: why the answer was kept although in doubt.
        hint_tokens: tokens of the prompt that show the draft of a cascade's first model.
        hint_dropped: why there are none, where the policy wants them.
        next_index: number of tokens held.
        attempt: the highest seen; frames of lower ones are dropped.
        last_token_at: when tokens, or the values that were wanted, arrived last, seconds.
        recoveries: how often another process continued the row.
        recovered_gap_s: the longest time without a token because of that.
        recovered_from: what was lost when another process continued it last: "worker" or "batcher".
        expected_s: how long it was expected to take when it was sent, seconds; 0: not known.
    """

    row_id: str
    model: str
    prompt_tokens: int
    open_text: OpenText | None
    stall_s: float
    sent_at: float
    settings: ModelSettings
    stop_token_ids: frozenset[int] = frozenset()
    resumed: int = 0
    # Without a type: as every row begins.
    sent = False
    taken = False
    final: frame_pb2.Final | None = None
    stopped = False
    escalation_reason = ""
    error: SluiceError | None = None
    kept_reason = ""
    hint_tokens = 0
    hint_dropped = ""
    next_index = 0
    attempt = 0
    last_token_at = -inf
    recoveries = 0
    recovered_gap_s = 0.0
    recovered_from = ""
    expected_s = 0.0
    _text: Transcript | None = None
    _accepted_attempt = -1
    """That of the last frame that was accepted, if one was."""
    _requested_at: float | None = None
    _lost = "worker"

    @property
    def transcript(self) -> Transcript:
        """The text of its tokens."""
        if self._text is None:
            assert self.open_text is not None, "its result is numbers"
            self._text = self.open_text()
        return self._text

    @property
    def output(self) -> OutputFilter | None:
        """What the safety policy does about the answer, as far as there is one."""
        return None if self._text is None else self._text.output

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of the answer so far, as the model gave them."""
        return () if self._text is None else self._text.token_ids

    @property
    def shown(self) -> int:
        """How many tokens of the answer callers may see, hidden ones among them."""
        return 0 if self._text is None else len(self._text.visible_ids)

    @property
    def raw_text(self) -> str:
        """The answer so far as the model gave it: with placeholders, before the output filter."""
        return self.transcript.text if self.output is None else self.output.raw

    @property
    def unread(self) -> bool:
        """Whether token classifiers have to read more of the answer."""
        return self.output is not None and self.output.unread

    def next_window(self) -> AnswerWindow | None:
        """The next part for token classifiers, if there is one to read now."""
        if self.output is None or self.output.windows is None or not self.unread:
            return None
        return self.output.windows.due()

    def settle(self, window: AnswerWindow, findings: Sequence[Finding]) -> None:
        """Token classifiers have read ``window``."""
        self.stopped |= self.transcript.settle(window, findings)

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far."""
        return 0 if self._text is None else len(self._text.token_ids)

    @property
    def usage(self) -> Usage:
        """Tokens of prompt and answer, as the server that computed them counts where there is one that says it."""
        prompt_tokens, completion_tokens = self.prompt_tokens, self.completion_tokens
        if (counted := self.server_tokens) is not None:
            # Of several answers to a prompt only one counts it.
            prompt_tokens = counted.prompt_tokens if prompt_tokens else 0
            completion_tokens = counted.completion_tokens
        cached = min(prompt_tokens, self.final.cached_prompt_tokens) if self.final else 0
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_prompt_tokens=cached,
            resumed_tokens=min(self.resumed, completion_tokens),
        )

    @property
    def timings(self) -> frame_pb2.TaskTimings:
        """How long its steps took; empty until it has ended."""
        return frame_pb2.TaskTimings() if self.final is None else self.final.timings

    def outcome(self) -> "FinishReason.ValueType | SluiceError | None":
        """Why the answer is complete, or why there is none; None while the row goes on."""
        if self.stopped:
            return FINISH_REASON_STOP_SEQUENCE
        if self._text is not None and self._text.contradicted:
            return contradiction()
        if self.final is None:
            return None
        return finish_reason_of(self.final.end) or error_of(self.final)

    def left_at(self, now: float) -> float:
        """When it was given up: with its last token, if it had one."""
        return min(now, max(self.last_token_at, self.sent_at))

    @property
    def server_tokens(self) -> frame_pb2.ServerTokens | None:
        """The tokens as the server that computed the row bills them, where there is one that says it."""
        if self.final is None or not self.final.HasField("server_tokens"):
            return None
        return self.final.server_tokens

    @property
    def billed_tokens(self) -> tuple[int, int]:
        """Tokens of prompt and answer that cost something: those that the caller brought do not."""
        if not self.taken or self.error is not None:
            return 0, 0
        if (counted := self.server_tokens) is not None:
            return counted.prompt_tokens, counted.completion_tokens
        return self.prompt_tokens, max(0, self.completion_tokens - self.resumed)

    @property
    def cost(self) -> float:
        """What its tokens so far cost."""
        return self.settings.cost(*self.billed_tokens)

    @property
    def stop_token_id(self) -> int | None:
        """The caller's stop token that ended the answer, if one did."""
        last = self.token_ids[-1:]
        return last[0] if last and last[0] in self.stop_token_ids else None

    def fence(self, attempt: int, lost: str) -> None:
        """Drops frames of attempts below ``attempt`` from now on, because this was lost."""
        self.attempt, self._requested_at, self._lost = attempt, None, lost

    def accept(self, frame: Frame, now: float) -> AcceptedFrame:
        """Adds what is new in ``frame``."""
        accepted = self._new_in(frame, now)
        if accepted.token_ids and self.open_text is not None:
            transcript, logprobs = self.transcript, accepted.logprobs
            was_closed = transcript.closed
            for position, token_id in enumerate(accepted.token_ids):
                if transcript.closed:
                    break
                known = position < len(logprobs)
                transcript.append(token_id, logprobs[position] if known else None)
            self.stopped |= transcript.closed and not was_closed
        return accepted

    def _new_in(self, frame: Frame, now: float) -> AcceptedFrame:
        if frame.attempt < self.attempt:
            return _NOTHING_NEW
        recovered = frame.attempt > self._accepted_attempt >= 0
        if recovered:
            self.recoveries += 1
            self.recovered_from = self._lost
            gap_s = now - max(self.last_token_at, self.sent_at)
            self.recovered_gap_s = max(self.recovered_gap_s, gap_s)
        self.attempt = self._accepted_attempt = frame.attempt
        self.taken = True
        if frame.start_index > self.next_index:
            return AcceptedFrame(gap=self._request(now), recovered=recovered)
        known = self.next_index - frame.start_index
        token_ids = frame.token_ids[known:]
        if frame.final.values:
            self.last_token_at = now
        if token_ids:
            self.next_index += len(token_ids)
            self._requested_at, self.last_token_at = None, now
        if frame.HasField("final"):
            self.final = frame.final
        return AcceptedFrame(token_ids, frame.logprobs[known:], recovered=recovered)

    def _request(self, now: float) -> bool:
        if self._requested_at is not None and now - self._requested_at < self.stall_s:
            return False
        self._requested_at = now
        return True

    def close(self, reason: "FinishReason.ValueType") -> "FinishReason.ValueType":
        """The row ended with ``reason``: no more tokens. Returns why the answer ended."""
        if self.open_text is None:
            return reason
        self.transcript.close(truncated=reason != FINISH_REASON_STOP)
        # The text that was held back may have completed a stop string or a match of the filter.
        if self.transcript.stop is not None:
            return FINISH_REASON_STOP_SEQUENCE
        if self.transcript.blocked:
            return FINISH_REASON_CONTENT_FILTER
        stopped = reason == FINISH_REASON_STOP and self.stop_token_id is not None
        return FINISH_REASON_STOP_SEQUENCE if stopped else reason


def finish_reason_of(end: "frame_pb2.TaskEnd.ValueType") -> "FinishReason.ValueType | None":
    """The reason of a complete answer; None when ``end`` is an error."""
    return _REASONS.get(end)


def contradiction() -> SluiceError:
    """The tokens that the caller resumed with are not those that it would be shown now."""
    return errors.InvalidRequest.of(
        "resume.token_ids",
        "are not the beginning of this answer: the model or the safety policy has changed since; "
        "ask again without resume",
    )


def error_of(final: frame_pb2.Final) -> SluiceError:
    """The public error for a row that ended with one."""
    if final.end == frame_pb2.TASK_END_DEADLINE:
        return errors.DeadlinePassed("the deadline passed before the answer was complete")
    if final.end == frame_pb2.TASK_END_CANCELLED:
        return errors.Cancelled("the request was cancelled")
    message = final.error.message or "the row ended without an answer"
    if final.error.field:  # the caller's fault
        return errors.InvalidRequest.of(final.error.field, message)
    kind = errors.BY_REASON.get(final.error.reason)
    if kind is errors.PromptTooLong:
        return kind(message, violations=[errors.FieldViolation("input", message)])
    if kind is None:
        refused = final.end == frame_pb2.TASK_END_REFUSED
        kind = errors.Overloaded if refused else errors.EngineFailed
    retryable = kind.code in (errors.Overloaded.code, errors.ModelUnavailable.code)
    return kind(
        message,
        retry_after_s=(final.error.retry_after_s or RETRY_AFTER_S) if retryable else None,
    )
