"""Answers requests in one message: GenerateText, and the entries of calls with many requests."""

from collections.abc import Iterable
from typing import Final

from gateway.admission.request_context import Call
from gateway.api.generate import Generator
from gateway.models.catalog import Catalog
from gateway.routing.router import price_of
from gateway.telemetry.request_log import RequestLog
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb

_OF_MODEL: Final = "text", "reasoning", "token_ids", "logprobs", "hidden_indexes", "tool_calls"
"""Fields of an answer that are cleared when another model takes over."""


async def whole_answer(
    generator: Generator, request: pb.GenerateRequest, call: Call
) -> tuple[pb.GenerateTextResponse, RequestLog]:
    """Return the only answer to `request`, in one message, and its log.

    Raises:
        SluiceError: See `Generator.answer`; InvalidRequest if the request wants several answers.
    """
    if request.sampling.n > 1:
        raise InvalidRequest.of("sampling.n", "must be 1 here; Generate gives several answers")
    answer = pb.GenerateTextResponse()

    async def collect(response: pb.GenerateResponse) -> None:
        add_events(answer, response)

    return answer, await generator.answer(request, call, collect)


async def answer_text(
    generator: Generator, request: pb.GenerateRequest, call: Call
) -> pb.GenerateTextResponse:
    """Return the answer alone, as `whole_answer` does."""
    answer, _ = await whole_answer(generator, request, call)
    return answer


def add_events(whole: pb.GenerateTextResponse, response: pb.GenerateResponse) -> None:
    """Add the next message of a stream to the whole answer."""
    if response.HasField("started"):
        whole.started.CopyFrom(response.started)
    for notice in response.notices:
        if notice.kind == pb.NOTICE_KIND_ESCALATED:
            for field in _OF_MODEL:
                whole.ClearField(field)
            whole.started.route.degraded |= notice.degraded
    whole.notices.extend(response.notices)
    if response.HasField("delta"):
        delta = response.delta
        whole.text += delta.text
        whole.reasoning += delta.reasoning
        whole.token_ids.extend(delta.token_ids)
        whole.logprobs.extend(delta.logprobs)
        whole.hidden_indexes.extend(delta.hidden_indexes)
        whole.tool_calls.extend(delta.tool_calls)
    if response.HasField("finished"):
        whole.finished.CopyFrom(response.finished)


def cost_of(catalog: Catalog, attempts: Iterable[pb.ModelUsage]) -> float:
    """Return what all models that worked on an answer cost, in the currency of the prices."""
    return sum(
        price_of(
            catalog.settings[attempt.model],
            attempt.usage.prompt_tokens,
            attempt.usage.completion_tokens - attempt.usage.resumed_tokens,
        )
        for attempt in attempts
    )
