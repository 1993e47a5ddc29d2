"""Count the tokens of a prompt, over gRPC and HTTP."""

from typing import Final

from gateway.admission.calls import AnyCall
from gateway.admission.pipeline import AdmittedRequest
from gateway.api.generate import Generator
from gateway.telemetry.request_log import untraced
from gateway.validation.requests import validate_count
from sluice.v1 import inference_pb2 as pb

GUARDS_S: Final = 60.0
"""How long a call that no model answers waits for guard models, unless its deadline is sooner, seconds."""


def guards_timeout_s(call: AnyCall) -> float:
    """Return how long ``call`` may wait for guard models, seconds."""
    remaining_s = call.remaining_s
    return GUARDS_S if remaining_s is None else min(remaining_s, GUARDS_S)


async def count_tokens(
    generator: Generator, request: pb.CountTokensRequest, call: AnyCall
) -> pb.CountTokensResponse:
    """Return how many tokens the prompt of ``request`` has.

    Raises:
        SluiceError: the request is wrong, or none is left of the caller's limits.
    """
    admission = generator.upstream.admission
    with admission.counted_check(call.caller):
        asked = validate_count(request, generator.catalog, guards_timeout_s(call), call.caller)
        async with generator.limiter.slot(asked.priority_class, asked.tenant):
            count, model = await admission.count(AdmittedRequest(asked, untraced()))
    return pb.CountTokensResponse(
        token_count=count, context_tokens=model.context_tokens, model=model.name
    )
