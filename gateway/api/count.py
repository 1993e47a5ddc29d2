"""Counts the tokens of a prompt, over gRPC and HTTP."""

from typing import Final

from gateway.admission.request_context import Call, RequestContext, RequestKind
from gateway.api.generate import Generator
from gateway.telemetry.request_log import untraced
from gateway.validation.texts import validate_count
from sluice.v1 import inference_pb2 as pb

GUARDS_S: Final = 60.0
"""Longest wait of a call for guard models, in seconds, if the call only counts or checks a text."""
CHECK: Final = RequestKind("", "", "the deadline passed before the text was checked")
"""Requests that only check or count a text."""


def guards_timeout_s(call: Call) -> float:
    """Return how long `call` may wait for guard models, seconds."""
    remaining_s = call.remaining_s
    return GUARDS_S if remaining_s is None else min(remaining_s, GUARDS_S)


async def count_tokens(
    generator: Generator, request: pb.CountTokensRequest, call: Call
) -> pb.CountTokensResponse:
    """Return how many tokens the prompt of `request` has.

    Raises:
        SluiceError: The request is wrong, or none is left of the caller's limits.
    """
    admission = generator.admission
    with admission.limits.counted(call.caller):
        valid = validate_count(request, generator.catalog, guards_timeout_s(call), call.caller)
        count, model = await admission.count(RequestContext(CHECK, valid, untraced()))
    return pb.CountTokensResponse(
        token_count=count, context_tokens=model.context_tokens, model=model.name
    )
