"""Request metrics. Counting an event changes a number in a dictionary, which is read when metrics are collected."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.util.types import AttributeValue

from gateway.streaming.stream import Stream
from gateway.validation.requests import ValidRequest
from sluice.telemetry import names
from sluice.v1.inference_pb2 import FinishReason
from sluice.wire.enums import word_of

FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
"""Bucket bounds of the histogram, from OpenTelemetry's GenAI conventions."""


class RequestMetrics:
    """Valid requests by outcome, their tokens, and the time to their first token.

    Labels are models, classes and outcomes; never tenants or requests, whose number has no bound.
    """

    def __init__(self, meter: Meter) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._first_token = meter.create_histogram(
            names.GEN_AI_TTFT,
            "s",
            "From the arrival of a request to its first token.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_S,
        )
        meter.create_observable_counter(
            names.METRIC_REQUESTS, [self._count_requests], "{request}", "Requests that have ended."
        )
        meter.create_observable_counter(
            names.METRIC_TOKENS, [self._count_tokens], "{token}", "Tokens of prompts and answers."
        )

    def count_refusal(self, priority_class: str, reason: str) -> None:
        """A valid request ended before it had a stream."""
        self._requests["", priority_class, reason] += 1

    def count_stream(self, request: ValidRequest, stream: Stream) -> None:
        """The stream of ``request`` ended."""
        model = stream.current.model
        self._requests[model, request.priority_class, _outcome(stream)] += 1
        for attempt in stream.attempts:
            prompt_tokens, answer_tokens = attempt.billed_tokens
            self._tokens[attempt.model, "input"] += prompt_tokens
            self._tokens[attempt.model, "output"] += answer_tokens
        if stream.first_token_s is not None:
            self._first_token.record(stream.first_token_s, _first_token_attributes(request, model))

    def _count_requests(self, options: CallbackOptions) -> Iterable[Observation]:
        # Called on another thread while the event loop counts: list() copies in one step.
        for (model, priority_class, outcome), count in list(self._requests.items()):
            attributes = {names.PRIORITY_CLASS: priority_class, names.OUTCOME: outcome}
            named = {names.GEN_AI_RESPONSE_MODEL: model} if model else {}
            yield Observation(count, {**named, **attributes})

    def _count_tokens(self, options: CallbackOptions) -> Iterable[Observation]:
        for (model, kind), count in list(self._tokens.items()):
            yield Observation(
                count, {names.GEN_AI_RESPONSE_MODEL: model, names.GEN_AI_TOKEN_TYPE: kind}
            )


def _outcome(stream: Stream) -> str:
    """The finish reason in lower case, or the reason of the error."""
    if stream.error is not None:
        return stream.error.reason
    assert stream.finished is not None, "it has ended"
    return word_of(FinishReason, stream.finished.reason)


def _first_token_attributes(request: ValidRequest, model: str) -> dict[str, AttributeValue]:
    return {
        names.GEN_AI_OPERATION: "text_completion" if request.conversation.raw else "chat",
        names.GEN_AI_SYSTEM: "sluice",
        names.GEN_AI_RESPONSE_MODEL: model,
        names.PRIORITY_CLASS: request.priority_class,
    }
