"""The interface between a worker and an engine.

An engine computes sequences together, one step at a time: sequences join and leave between any two steps (continuous batching).
It is driven by one thread and never looks at a clock: ``now`` is monotonic seconds and comes from the caller.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar, Final, Protocol

from sluice.internal.v1 import frame_pb2, task_pb2, worker_pb2
from sluice.settings import SettingsError

ENGINE_FAILED: Final = "ENGINE_FAILED"
READ_S: Final = 1.0
"""The tokens of a sequence that gathers them for longer are read when it has ended: its first one waits too, seconds."""


class SequenceEnd(IntEnum):
    """Why a sequence ended; the numbers are those of the wire."""

    STOP = frame_pb2.TASK_END_STOP
    LENGTH = frame_pb2.TASK_END_LENGTH
    CANCELLED = frame_pb2.TASK_END_CANCELLED
    DEADLINE = frame_pb2.TASK_END_DEADLINE
    FAILED = frame_pb2.TASK_END_FAILED
    """The sequence cannot be computed, by this engine or another."""
    RETURNED = frame_pb2.TASK_END_RETURNED
    """This engine cannot compute it now; another one may."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens of a sequence are drawn; already validated. Fields as in the wire's ``Sampling``."""

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
        """Whether the whole answer has a constraint."""
        return bool(self.constraint_field)

    @property
    def constraint_field(self) -> str:
        """The path of the field of the public request that the constraint comes from; empty without one."""
        if self.json_schema is not None:
            return "sampling.json_schema"
        if self.regex is not None:
            return "sampling.regex"
        return "tools" if self.grammar is not None else ""


@dataclass(frozen=True, slots=True)
class ValuesSpec:
    """Which numbers a sequence wants instead of an answer. Fields as in the wire's ``Values``."""

    dimensions: int = 0
    normalize: bool | None = None
    second_text: int = 0
    scored_token_ids: tuple[int, ...] = ()
    scored_alternatives: int = 0


@dataclass(frozen=True, slots=True)
class AudioSpec:
    """What a sequence hears. Fields as in the wire's ``Audio``."""

    pcm: bytes
    opening: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to compute.

    Attributes:
        owner: the batcher that gets its frames.
        attempt: a higher one replaces a sequence of the same request.
        prompt: at least one token.
        produced: tokens of the answer that exist already; the sequence continues after them.
        deadline: monotonic seconds; None means none.
    """

    request_id: str
    owner: str
    attempt: int
    prompt: tuple[int, ...]
    produced: tuple[int, ...]
    sampling: Sampling
    deadline: float | None = None
    rank: int = 0
    """The rank of its class: 0 is the most urgent. Sequences of a higher rank may be preempted for those of a lower one."""
    gather_s: float = 0.0
    """How long its tokens may wait for more before they are sent, seconds; see `wait_s`."""
    values: ValuesSpec | None = None
    """None: tokens are wanted."""
    audio: AudioSpec | None = None
    """What it hears; the prompt is what its decoder begins with. None: nothing."""
    tenant: str = ""
    """The tenant that asked: a prefix cache per tenant shares blocks among its sequences alone."""
    last_try: bool = False
    """Whether the worker computes no other sequence with it."""
    batch: str = ""
    """The batcher's batch that it came in: an engine that computes whole batches keeps its sequences together."""
    traceparent: str = ""
    """W3C trace context that work on the sequence elsewhere belongs to; empty: none."""

    def wait_s(self, index: int, end: SequenceEnd | None) -> float:
        """How long what a step brings, from token ``index`` of the answer on, may wait for more of the sequence, seconds.

        The first token does not wait where somebody reads tokens as they come, nor does the end of an urgent sequence.
        """
        first = index == len(self.produced) and self.gather_s <= READ_S
        return 0.0 if first or (end is not None and not self.rank) else self.gather_s

    def ended(
        self,
        end: SequenceEnd,
        error: str = "",
        reason: str = ENGINE_FAILED,
        tokens: int = 0,
        field: str = "",
    ) -> "SequenceStep":
        """The report of its end, without an engine; ``tokens``: of its answer, beside those of earlier attempts."""
        return SequenceStep(
            request_id=self.request_id,
            owner=self.owner,
            attempt=self.attempt,
            start_index=len(self.produced) + tokens,
            end=end,
            error=error,
            reason=reason,
            field=field,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, after temperature and penalties, before top-k and top-p.

    Attributes:
        top: (token, log-probability), most probable first.
        text: of a server whose tokens are not ours: that of its token, which ends here; empty: it ends later.
        top_texts: the same as ``top`` of such a server, by text.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str | None = None
    top_texts: tuple[tuple[str, float], ...] = ()


# Not frozen, which would make each of them, one a token, three times as expensive.
@dataclass(slots=True)
class SequenceStep:
    """What one step did to one sequence: tokens, its end, or both.

    Attributes:
        start_index: index of the first of ``token_ids`` in the answer.
        logprobs: one per token when asked for, else empty.
        end: set in the last step of a sequence, and only there.
        error: one sentence when ``end`` is FAILED or RETURNED, and ``reason`` one of `sluice.errors`;
            ``retry_after_s``: when a new try may succeed, 0 where that is not known; ``field``: the path of the field
            of the public request that is to blame, empty where none is.
        cached_prompt_tokens: tokens of the prompt that were found in the prefix cache.
        server_tokens: of prompt and answer, as the server that computed the sequence counts and bills them.
        wait_s: how long it may wait for more of the sequence before it is sent, seconds.
        values: the numbers that `SequenceSpec.values` asked for, float32, little-endian; only with the end.
    """

    request_id: str
    owner: str
    attempt: int
    start_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    end: SequenceEnd | None = None
    error: str = ""
    reason: str = ENGINE_FAILED
    cached_prompt_tokens: int = 0
    server_tokens: tuple[int, int] | None = None
    wait_s: float = 0.0
    values: bytes = b""
    retry_after_s: float = 0.0
    field: str = ""

    def failed(self, end: SequenceEnd, error: str, field: str = "") -> "SequenceStep":
        """Return the same step, ended by ``error``: the caller's fault where it names a ``field`` of the request."""
        reason = RowInvalid.reason if field else ENGINE_FAILED
        return replace(self, end=end, error=error, reason=reason, field=field)


class Refused(Exception):
    """A sequence was not taken.

    Attributes:
        reason: an ErrorInfo reason of `sluice.errors`.
        retryable: whether another worker, or this one later, may take it.
        field: the path of the field of the public request that is to blame; empty: none is.
    """

    reason: ClassVar[str]
    retryable: ClassVar[bool]

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class RowInvalid(Refused):
    """The sequence cannot be computed as it is."""

    reason = "REQUEST_INVALID"
    retryable = False


class RowStale(RowInvalid):
    """A sequence of the same request with this or a higher attempt is here already."""


class RowTooLong(Refused):
    """The prompt leaves no room for an answer in the model's context."""

    reason = "PROMPT_TOO_LONG"
    retryable = False


class EngineFull(Refused):
    """All slots and waiting places are taken."""

    reason = "OVERLOADED"
    retryable = True


class Engine(Protocol):
    """Computes sequences. Not thread-safe: one thread drives it."""

    def add(self, sequence: SequenceSpec, now: float) -> None:
        """Takes ``sequence``; it joins at one of the next steps. Replaces a sequence of the same request and lower attempt.

        Raises:
            Refused: one of the kinds above; nothing has changed.
        """

    def cancel(self, request_ids: Collection[str]) -> None:
        """Removes sequences before the next step, which reports their end; unknown ones are ignored."""

    def step(self, now: float) -> list[SequenceStep]:
        """Drops what is cancelled or past its deadline, then computes all sequences it has room for, in one forward pass."""

    def abort(self, message: str) -> list[SequenceStep]:
        """Ends all sequences as RETURNED, after `step` has raised. The engine is empty afterwards."""

    def has_sequences(self) -> bool:
        """Whether `step` has anything to do."""

    def load(self) -> worker_pb2.WorkerLoad:
        """How busy it is."""


def warm_up(
    engine: Engine,
    *,
    max_tokens: int = 1,
    values: ValuesSpec | None = None,
    audio: AudioSpec | None = None,
) -> None:
    """Computes a first sequence: first-time set-up must not delay the first caller.

    Raises:
        SettingsError: that fails, so every sequence would.
    """
    sampling = Sampling(max_tokens=max_tokens)
    engine.add(
        SequenceSpec("warm-up", "", 0, (1, 1), (), sampling, values=values, audio=audio), 0.0
    )
    while engine.has_sequences():
        for step in engine.step(0.0):
            if step.error:
                raise SettingsError(f"cannot compute its first sequence: {step.error}")
