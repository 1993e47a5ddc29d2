"""The interface between a worker and its engine.

An engine computes many sequences together, step by step (continuous batching): sequences join and leave between any two
steps. One thread drives it. `now` is the time, in monotonic seconds.

Invalid sequences are refused with errors of `sluice.errors`: `InvalidRequest` and `PromptTooLong` would fail anywhere,
`Overloaded` may succeed on another worker or later.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Protocol

from sluice.errors import EngineFailed, InvalidRequest, Overloaded, SluiceError
from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.internal.v1.worker_pb2 import WorkerLoad
from sluice.settings import SettingsError

STREAM_COALESCE_MAX_S: Final = 1.0
"""Longest coalescing time of an answer that is read while it streams, in seconds.

With a longer one nobody reads before the end (items of jobs), so that even the first token may be delayed.
"""


class SequenceEnd(IntEnum):
    """Why a sequence ended, with the numbers of the wire's `TaskEnd`."""

    STOP = frame_pb2.TASK_END_STOP
    LENGTH = frame_pb2.TASK_END_LENGTH
    CANCELLED = frame_pb2.TASK_END_CANCELLED
    DEADLINE = frame_pb2.TASK_END_DEADLINE
    FAILED = frame_pb2.TASK_END_FAILED
    """No engine can compute the sequence."""
    RETURNED = frame_pb2.TASK_END_RETURNED
    """This engine cannot compute the sequence now; another one may."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Validated sampling parameters; the fields are those of the wire's `Sampling`."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    logprobs: bool = False
    top_logprobs: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    server: task_pb2.ServerOptions | None = None

    @property
    def constrained(self) -> bool:
        """Whether the answer has a constraint."""
        return bool(self.constraint_field)

    @property
    def constraint_field(self) -> str:
        """Path of the public request's field that the constraint comes from; empty without a constraint."""
        if self.json_schema is not None:
            return "sampling.json_schema"
        if self.regex is not None:
            return "sampling.regex"
        return "tools" if self.grammar is not None else ""


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A task as an engine accepts it.

    Attributes:
        owner: The batcher that gets the frames.
        attempt: Attempt number; a higher one replaces a sequence of the same request.
        prompt: Token ids, at least one.
        produced: Tokens of the answer that exist already; the sequence continues after them.
        deadline: Monotonic seconds; None: no deadline.
        rank: Rank of the class, 0 for the most urgent. Lower ranks may preempt higher ones.
        coalesce_s: Maximum time for which its tokens are coalesced, in seconds; see `delay_s`.
        values: Numbers to compute instead of an answer.
        audio: Sound for a speech model; `prompt` then holds the first tokens of the decoder.
        tenant: A prefix cache per tenant shares blocks only among sequences of one tenant.
        last_try: Whether the worker must compute no other sequence beside it.
        batch: Id of the batch that it came in, which whole-batch engines keep together.
        traceparent: W3C trace context for work on the sequence elsewhere; may be empty.
    """

    request_id: str
    owner: str
    attempt: int
    prompt: tuple[int, ...]
    produced: tuple[int, ...]
    sampling: Sampling
    deadline: float | None = None
    rank: int = 0
    coalesce_s: float = 0.0
    values: task_pb2.Values | None = None
    audio: task_pb2.Audio | None = None
    tenant: str = ""
    last_try: bool = False
    batch: str = ""
    traceparent: str = ""

    def delay_s(self, index: int, end: SequenceEnd | None) -> float:
        """Return how long tokens from `index` of the answer on may be coalesced, in seconds.

        The first token of a streamed answer is never delayed, nor is the end of a most urgent sequence.
        """
        first = index == len(self.produced) and self.coalesce_s <= STREAM_COALESCE_MAX_S
        return 0.0 if first or (end is not None and not self.rank) else self.coalesce_s

    def ended(self, end: SequenceEnd, error: str = "", tokens: int = 0) -> "SequenceStep":
        """Return the last step of a sequence that no engine has, after `tokens` of this attempt."""
        return SequenceStep(
            request_id=self.request_id,
            owner=self.owner,
            attempt=self.attempt,
            start_index=len(self.produced) + tokens,
            end=end,
            error=error,
        )

    def refused(self, error: SluiceError) -> "SequenceStep":
        """Return the last step of a sequence that is refused after it was accepted."""
        end = SequenceEnd.RETURNED if is_retryable(error) else SequenceEnd.FAILED
        message, field = describe(error)
        return replace(self.ended(end, message), reason=error.reason, field=field)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, after temperature and penalties, before top-k and top-p.

    Attributes:
        top: Pairs of token and log-probability, most probable first.
        text: Of an upstream server with its own tokenizer: text of its token, if the token ends here; empty: it ends
            later.
        top_texts: As `top`, by text, of such a server.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str | None = None
    top_texts: tuple[tuple[str, float], ...] = ()


# Not frozen: one is made for each sequence and step, and frozen ones take three times as long to make.
@dataclass(slots=True)
class SequenceStep:
    """Result of one step for one sequence: tokens, its end, or both.

    Attributes:
        start_index: Index of the first token in the answer.
        logprobs: One per token if requested, else empty.
        end: Set in the last step of a sequence, and only there.
        error: One sentence if `end` is FAILED or RETURNED.
        reason: Reason of that error, one of `sluice.errors`.
        cached_prompt_tokens: Prompt tokens found in the prefix cache.
        server_tokens: Prompt and answer tokens as the upstream server counts them.
        delay_s: How long the step may be coalesced before it is sent, in seconds.
        values: Numbers that `SequenceSpec.values` asked for, float32, little-endian; only with the end.
        retry_after_s: Seconds until a new attempt may succeed; 0: not known.
        field: Path of the invalid field of the public request; empty: none.
    """

    request_id: str
    owner: str
    attempt: int
    start_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    end: SequenceEnd | None = None
    error: str = ""
    reason: str = EngineFailed.reason
    cached_prompt_tokens: int = 0
    server_tokens: tuple[int, int] | None = None
    delay_s: float = 0.0
    values: bytes = b""
    retry_after_s: float = 0.0
    field: str = ""

    def failed(self, end: SequenceEnd, error: str, field: str = "") -> "SequenceStep":
        """Return the same step, ended by `error`: the caller's fault if it names a `field` of the request."""
        reason = InvalidRequest.reason if field else EngineFailed.reason
        return replace(self, end=end, error=error, reason=reason, field=field)


class Engine(Protocol):
    """Computes sequences. Not thread-safe: one thread drives it."""

    def add(self, sequence: SequenceSpec, now: float) -> None:
        """Accept a sequence, which joins in one of the next steps and replaces one of a lower attempt.

        Raises:
            SluiceError: It is refused, and nothing has changed; see the module.
        """

    def cancel(self, request_ids: Collection[str]) -> None:
        """Cancel sequences; the next step reports their end. Unknown ones are ignored."""

    def step(self, now: float) -> list[SequenceStep]:
        """End cancelled, late and complete sequences, compute a step of those with capacity; return what each got."""

    def abort(self, message: str) -> list[SequenceStep]:
        """End all sequences as RETURNED, also after `step` has raised. The engine is empty afterwards."""

    def has_sequences(self) -> bool:
        """Return whether `step` has anything to do."""

    def load(self) -> WorkerLoad:
        """Return the load, a new message."""


def is_retryable(error: SluiceError) -> bool:
    """Return whether another worker, or this one later, may accept what `error` refuses."""
    return isinstance(error, Overloaded)


def describe(error: SluiceError) -> tuple[str, str]:
    """Return the message of an error, and the path of the request's field that is invalid (empty: none)."""
    for violation in error.violations:
        return violation.description, violation.field
    return error.message, ""


def warm_up(
    engine: Engine,
    *,
    max_tokens: int = 1,
    values: task_pb2.Values | None = None,
    audio: task_pb2.Audio | None = None,
) -> None:
    """Compute a first sequence, so that first-time set-up does not delay the first caller.

    Raises:
        SettingsError: The sequence fails, so every one would.
        SluiceError: The engine refuses the sequence.
    """
    sampling = Sampling(max_tokens=max_tokens)
    engine.add(SequenceSpec("warm-up", "", 0, (1, 1), (), sampling, values=values, audio=audio), 0)
    while engine.has_sequences():
        for step in engine.step(0.0):
            if step.error:
                raise SettingsError(f"cannot compute its first sequence: {step.error}")
