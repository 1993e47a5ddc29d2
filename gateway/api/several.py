"""Several answers to one request (``n``): a call for each, inside the caller's.

Each answer is admitted, limited, recorded, traced and kept by idempotency key for itself, so all that holds of one
answer holds of each. Their rows have one prompt: a worker computes it once and shares its blocks (prefix cache), and it
is counted once, with the first answer. When one of the calls fails, so does the caller's.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from gateway.validation.requests import ValidRequest
from sluice.v1.inference_pb2 import GenerateResponse, SamplingParams

Write = Callable[[GenerateResponse], Awaitable[None]]


def requests_of(request: ValidRequest) -> list[ValidRequest]:
    """One request for each of the n answers."""
    route_key = secrets.token_hex(8)
    return [
        replace(
            request,
            sampling=_sampling(request.sampling, index),
            # No tenant has "#" in its name.
            key=request.key.replace(" ", f"#{index} ", 1) if index else request.key,
            answer_index=index,
            route_key=route_key,
        )
        for index in range(request.sampling.n)
    ]


def _sampling(params: SamplingParams, index: int) -> SamplingParams:
    """For one answer; the first has the request's seed, the others seeds that depend on it and their index alone."""
    sampling = SamplingParams()
    sampling.CopyFrom(params)
    sampling.ClearField("n")
    if index and sampling.HasField("seed"):
        digest = hashlib.sha256(f"{sampling.seed} {index}".encode()).digest()
        sampling.seed = int.from_bytes(digest[:8]) >> 1
    return sampling


async def answer_all(
    requests: Sequence[ValidRequest],
    answer: Callable[[ValidRequest, Write], Coroutine[Any, Any, None]],
    write: Write,
) -> None:
    """Runs ``answer`` for each request; their events go to ``write``, one at a time and with the index of the answer.

    Raises:
        SluiceError: the first that one of them raised; the others were cancelled.
    """
    turn = asyncio.Lock()

    def numbered(index: int) -> Write:
        async def write_next(event: GenerateResponse) -> None:
            copy = GenerateResponse(answer_index=index)
            copy.MergeFrom(event)
            async with turn:
                await write(copy)

        return write_next

    try:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(answer(request, numbered(request.answer_index)))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
