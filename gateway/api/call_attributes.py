"""Attributes of the spans of a call of Generate."""

from collections.abc import Mapping, Sequence

from opentelemetry.util.types import AttributeValue

from gateway.routing.router import ModelFacts
from gateway.safety.dry_run import move_labels
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.idempotency import Replay
from gateway.streaming.stream import Stream
from gateway.telemetry.spans import finding_attributes
from gateway.validation.requests import ValidRequest
from sluice.defaults import AUTO
from sluice.telemetry import names
from sluice.v1.inference_pb2 import FinishReason, GenerateRequest, Priority, RouteStrategy, Started
from sluice.wire.attempts import ATTEMPTS_PER_TASK
from sluice.wire.enums import word_of
from sluice.wire.subjects import is_token

Attributes = dict[str, AttributeValue]


def request_attributes(request: ValidRequest, operation: str = "") -> Attributes:
    """What was asked, for the server span; unless it names an ``operation`` it is a prompt or a chat."""
    prompted = "text_completion" if request.conversation.raw else "chat"
    attributes: Attributes = {
        names.GEN_AI_OPERATION: operation or prompted,
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


def call_attributes(wire: GenerateRequest, tenant: str, request_id: str) -> Attributes:
    """What every call is searched by, before it is known to be valid."""
    return {
        names.REQUEST_ID: request_id,
        names.TENANT: tenant,
        # Text that was put in the wrong field must not get into traces.
        names.GEN_AI_REQUEST_MODEL: _model_name(wire.model or AUTO),
        names.PRIORITY_CLASS: word_of(Priority, wire.priority),
    }


def _model_name(given: str) -> str:
    return given if is_token(given) else "invalid"


def reasons_attribute(reasons: Sequence[str]) -> Attributes:
    """How the answers ended, for the server span of a call with several."""
    return {names.GEN_AI_FINISH_REASONS: list(reasons)}


def end_attributes(answer: Stream | Replay, models: Mapping[str, ModelFacts]) -> Attributes:
    """How the answer ended, as far as it has, for the server span."""
    attributes: Attributes = {}
    finished = answer.finished
    if finished is not None:
        attributes[names.GEN_AI_FINISH_REASONS] = [word_of(FinishReason, finished.reason)]
        attributes[names.GEN_AI_OUTPUT_TOKENS] = finished.usage.completion_tokens
        attributes[names.MODELS_TRIED] = [one.model for one in finished.attempts]
        if finished.usage.cached:
            attributes[names.CACHED] = True
        attributes |= _answering(finished.model, models)
    if isinstance(answer, Stream):
        attributes[names.MODELS_TRIED] = [one.model for one in answer.attempts]
        attributes |= _answering(answer.current.model, models) | _recovery(answer)
    if answer.escalation_reason:
        attributes[names.ROUTE_ESCALATED] = answer.escalation_reason
    if answer.first_token_s is not None:
        attributes[names.GEN_AI_TTFT] = answer.first_token_s
    return attributes


def _answering(model: str, models: Mapping[str, ModelFacts]) -> Attributes:
    tier = {names.TIER: models[model].tier} if model in models else {}
    return {names.GEN_AI_RESPONSE_MODEL: model, **tier}


def _recovery(stream: Stream) -> Attributes:
    recovered = [one.assembler for one in stream.attempts if one.assembler.recoveries]
    if not recovered:
        return {}
    return {
        names.RECOVERED: sum(one.recoveries for one in recovered),
        names.RECOVERED_FROM: "batcher" if recovered[-1].recovered_task else "worker",
        names.RECOVERED_GAP_S: max(one.recovered_gap_s for one in recovered),
    }


def attempt_end(stream: Stream, now: float, row_id: str) -> tuple[Attributes, float]:
    """How a row of ``stream``, which has ended now, ended, for its span; and how many seconds ago."""
    attempt = next((one for one in stream.attempts if one.row_id == row_id), None)
    if attempt is None:
        return {names.END: "unused"}, 0.0
    ago_s = 0.0 if attempt is stream.current else now - attempt.left_at(now)
    return _attempt_attributes(attempt, stream), ago_s


def _attempt_attributes(attempt: ModelAttempt, stream: Stream) -> Attributes:
    attributes: Attributes = {
        names.END: _end(attempt, stream),
        names.TASK_ATTEMPT: attempt.assembler.attempt // ATTEMPTS_PER_TASK,
        names.GEN_AI_OUTPUT_TOKENS: attempt.completion_tokens,
    }
    if attempt is not stream.current or stream.finished is None or attempt.inspection is None:
        return attributes
    outcome = attempt.inspection.outcome()
    attributes[names.SAFETY_POLICY] = outcome.policy
    attributes |= finding_attributes(outcome.taken)
    if outcome.moves:
        attributes[names.DRY_RUN] = move_labels(outcome.moves)
    return attributes


def _end(attempt: ModelAttempt, stream: Stream) -> str:
    if attempt is not stream.current:
        return "escalated"
    return "answered" if stream.error is None else stream.error.reason.lower()
