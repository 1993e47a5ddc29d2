"""Attributes of the spans of a call of Generate."""

from opentelemetry.util.types import AttributeValue

from gateway.safety.dry_run import move_labels
from gateway.streaming.stream import Stream
from gateway.telemetry.spans import finding_attributes
from gateway.validation.requests import ValidRequest
from sluice.defaults import AUTO
from sluice.telemetry import names
from sluice.v1.inference_pb2 import Finished, FinishReason, RouteStrategy, Started
from sluice.wire.enums import word_of

Attributes = dict[str, AttributeValue]


def request_attributes(request: ValidRequest) -> Attributes:
    """What was asked, for the server span."""
    attributes: Attributes = {
        names.GEN_AI_OPERATION: "text_completion" if request.conversation.raw else "chat",
        names.GEN_AI_SYSTEM: "sluice",
        names.GEN_AI_REQUEST_MODEL: request.model or AUTO,
        names.PRIORITY_CLASS: request.priority_class,
        names.TENANT: request.tenant,
    }
    if request.sampling.HasField("max_tokens"):
        attributes[names.GEN_AI_MAX_TOKENS] = request.sampling.max_tokens
    return attributes


def started_attributes(started: Started) -> Attributes:
    """Who answers, for the server span."""
    return {
        names.REQUEST_ID: started.request_id,
        names.GEN_AI_RESPONSE_MODEL: started.model,
        names.TIER: started.route.tier,
        names.ROUTE_STRATEGY: word_of(RouteStrategy, started.route.strategy),
        names.GEN_AI_INPUT_TOKENS: started.prompt_tokens,
    }


def end_attributes(
    finished: Finished | None, escalation_reason: str, first_token_s: float | None
) -> Attributes:
    """How the answer ended, as far as it has, for the server span."""
    attributes: Attributes = {}
    if finished is not None:
        attributes[names.GEN_AI_FINISH_REASONS] = [word_of(FinishReason, finished.reason)]
        attributes[names.GEN_AI_OUTPUT_TOKENS] = finished.usage.completion_tokens
    if escalation_reason:
        attributes[names.ROUTE_ESCALATED] = escalation_reason
    if first_token_s is not None:
        attributes[names.GEN_AI_TTFT] = first_token_s
    return attributes


def stream_attributes(stream: Stream) -> Attributes:
    """For the stream span: the attempt that gave the answer, and what the safety policy found in it."""
    attributes: Attributes = {names.ATTEMPT: stream.current.assembler.attempt}
    if stream.finished is None or stream.current.inspection is None:
        return attributes
    outcome = stream.current.inspection.outcome()
    attributes[names.SAFETY_POLICY] = outcome.policy
    attributes |= finding_attributes(outcome.taken)
    if outcome.moves:
        attributes[names.DRY_RUN] = move_labels(outcome.moves)
    return attributes
