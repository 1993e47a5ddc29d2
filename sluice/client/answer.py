"""Answers as frozen data, event by event and whole.

A stream is one `Started`, any number of `Delta` and `Notice`, and one `Finished`. `AnswerBuilder` collects them into
an `Answer`. What `sluice.v1` defines in the same form, such as `Usage`, is its message.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2 import ModelUsage, TokenLogprobs, ToolCall, Usage
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of
from sluice.wire.tokens import VisibleToken, tokens_of


class FinishReason(StrEnum):
    """The reason why an answer ended."""

    STOP = "stop"
    """The model ended it."""
    LENGTH = "length"
    """It reached `max_tokens` or the end of the context."""
    STOP_SEQUENCE = "stop_sequence"
    """It contained one of the request's stop strings."""
    CONTENT_FILTER = "content_filter"
    """The safety policy ended it; `Finished.rules` names the rules."""
    TOOL_CALLS = "tool_calls"
    """The model ended it, and it has tool calls."""
    UNKNOWN = "unknown"
    """A reason that is newer than this client."""

    @classmethod
    def _missing_(cls, value: object) -> "FinishReason":
        return cls.UNKNOWN


class NoticeKind(StrEnum):
    """What a `Notice` reports."""

    RECOVERED = "recovered"
    """The process that computed the answer failed; another one continued at the same token."""
    REPLAYED = "replayed"
    """The answer is a replay of an earlier one with the same idempotency key."""
    ESCALATED = "escalated"
    """The first model's answer was rejected and `Notice.model` answers instead: every delta so far is void."""
    RECONNECTED = "reconnected"
    """This client lost its connection and continued at the same token; `Notice.message` names the request."""
    UNKNOWN = "unknown"
    """A kind that is newer than this client."""

    @classmethod
    def _missing_(cls, value: object) -> "NoticeKind":
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class Route:
    """Why a model was chosen.

    Attributes:
        tier: Tier of the model, "small" or "large".
        strategy: Strategy that chose it.
        reason: The reason, as a sentence for people.
        degraded: Whether it is a fallback for the chosen model, which failed or could not have answered in time.
    """

    tier: str
    strategy: str
    reason: str
    degraded: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted.

    Attributes:
        request_id: Id of the request in logs, records and errors.
        trace_id: Id of its trace, 32 hex digits.
        model: Name of the model that answers.
        route: Why that model was chosen.
        seed: Seed from which tokens are sampled.
        prompt_tokens: Number of tokens of the prompt, including the chat template.
    """

    request_id: str
    trace_id: str
    model: str
    route: Route
    seed: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer.

    Attributes:
        text: Text to append.
        token_ids: Tokens of the piece. None stands for a token whose text the safety policy hides.
        index: Position of the first of them in the answer.
        logprobs: Log-probabilities of the tokens, if requested; blank for hidden tokens.
        tool_calls: Tool calls that this piece completes.
        reasoning: Reasoning to append, if the model separates it from the answer.
    """

    text: str
    token_ids: tuple[VisibleToken, ...]
    index: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something happened that did not end the answer.

    Attributes:
        kind: What happened.
        message: The same as a sentence for people.
        model: With `NoticeKind.ESCALATED`, the model that answers from now on.
        degraded: Whether that model is a fallback for one that failed.
        inexact: With `NoticeKind.RECOVERED`, whether later tokens may differ from those of an undisturbed answer.
    """

    kind: NoticeKind
    message: str
    model: str = ""
    degraded: bool = False
    inexact: bool = False


@dataclass(frozen=True, slots=True)
class Timings:
    """Time that a request spent in each stage, in milliseconds; inference.proto defines the stages."""

    admission_ms: float
    safety_ms: float
    route_ms: float
    tokenize_ms: float
    publish_ms: float
    queue_ms: float
    batch_ms: float
    prefill_ms: float
    decode_ms: float
    delivery_ms: float
    time_to_first_token_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete.

    Attributes:
        reason: Why it ended.
        usage: Tokens that `model` used.
        timings: Time spent in each stage.
        stop: Stop string that ended it; empty if none did.
        rules: Rules of the safety policy that ended it.
        model: Name of the model that answered.
        attempts: Usage of every model that worked on the answer, in order.
        stop_token_id: Token of the request's `stop_token_ids` that ended it; None if none did.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str
    rules: tuple[str, ...] = ()
    model: str = ""
    attempts: tuple[ModelUsage, ...] = ()
    stop_token_id: int | None = None


Event = Started | Delta | Notice | Finished


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Fields without a description are those of its events.

    Attributes:
        request_id: Id of the request, the first one if the stream was resumed.
        model: Name of the model that answered; after an escalation not the model that was asked first.
        text: The whole text.
        notices: What happened while it was computed, in order.
        finish_reason: Why it ended.
        usage: Tokens that `model` used; `attempts` has the usage of every model.
        tool_calls: Tool calls, complete.
        reasoning: Reasoning, if the model separates it from the answer.
    """

    request_id: str
    trace_id: str
    model: str
    route: Route
    seed: int
    text: str
    token_ids: tuple[VisibleToken, ...]
    logprobs: tuple[TokenLogprobs, ...]
    notices: tuple[Notice, ...]
    finish_reason: FinishReason
    stop: str
    usage: Usage
    timings: Timings
    rules: tuple[str, ...] = ()
    attempts: tuple[ModelUsage, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    @property
    def tier(self) -> str:
        """The tier of the model that was asked first."""
        return self.route.tier


class AnswerBuilder:
    """Collects the events of one answer; `build` returns it after `Finished`."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._deltas: list[Delta] = []
        self._notices: list[Notice] = []
        self._finished: Finished | None = None
        self._degraded = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(delta.text for delta in self._deltas)

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case Started():
                self._started = event
            case Delta():
                self._deltas.append(event)
            case Notice():
                self._notices.append(event)
                if event.kind is NoticeKind.ESCALATED:
                    self._deltas.clear()
                    self._degraded |= event.degraded
            case Finished():
                self._finished = event

    def build(self) -> Answer:
        """Return the answer; valid only after `Finished`."""
        started, finished = self._started, self._finished
        assert started is not None, "the answer did not start"
        assert finished is not None, "the answer is not complete"
        return Answer(
            request_id=started.request_id,
            trace_id=started.trace_id,
            model=finished.model or started.model,
            route=replace(started.route, degraded=self._degraded or started.route.degraded),
            seed=started.seed,
            text=self.text,
            token_ids=tuple(token for delta in self._deltas for token in delta.token_ids),
            logprobs=tuple(entry for delta in self._deltas for entry in delta.logprobs),
            notices=tuple(self._notices),
            finish_reason=finished.reason,
            stop=finished.stop,
            usage=finished.usage,
            timings=finished.timings,
            rules=finished.rules,
            attempts=finished.attempts,
            tool_calls=tuple(call for delta in self._deltas for call in delta.tool_calls),
            reasoning="".join(delta.reasoning for delta in self._deltas),
        )


def whole_answer(message: pb.GenerateTextResponse) -> Answer:
    """Return the answer in `message`."""
    builder = AnswerBuilder()
    builder.add(started_of(message.started))
    builder.add(
        delta_of(
            pb.Delta(
                text=message.text,
                reasoning=message.reasoning,
                token_ids=message.token_ids,
                hidden_indexes=message.hidden_indexes,
                logprobs=message.logprobs,
                tool_calls=message.tool_calls,
            )
        )
    )
    notices = tuple(notice_of(notice) for notice in message.notices)
    builder.add(finished_of(message.finished))
    return replace(builder.build(), notices=notices)


def started_of(message: pb.Started) -> Started:
    """Return the event in `message`."""
    chosen = message.route
    route = Route(
        chosen.tier, word_of(pb.RouteStrategy, chosen.strategy), chosen.reason, chosen.degraded
    )
    return Started(
        message.request_id,
        message.trace_id,
        message.model,
        route,
        message.seed,
        message.prompt_tokens,
    )


def delta_of(message: pb.Delta) -> Delta:
    """Return the event in `message`."""
    return Delta(
        *(message.text, tokens_of(message, message.index), message.index),
        *(tuple(message.logprobs), tuple(message.tool_calls), message.reasoning),
    )


def notice_of(message: pb.Notice) -> Notice:
    """Return the event in `message`."""
    kind = NoticeKind(word_of(pb.NoticeKind, message.kind))
    return Notice(kind, message.message, message.model, message.degraded, message.inexact)


def finished_of(message: pb.Finished) -> Finished:
    """Return the event in `message`."""
    hops = {name: getattr(message.timings, name.removesuffix("_ms")) for name in Timings.__slots__}
    return Finished(
        FinishReason(word_of(pb.FinishReason, message.reason)),
        message.usage,
        Timings(**{name: ms_of(hop) for name, hop in hops.items()}),
        message.stop,
        tuple(message.rules),
        message.model,
        tuple(message.attempts),
        message.stop_token_id if message.HasField("stop_token_id") else None,
    )
