"""Traces of a cascade, of a refused call and of 32 callers at the same time are whole."""

import asyncio
import contextlib

import grpc
import pytest

from cli.trace_rules import faults
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.mesh import CASCADE, RunningMesh
from tests.support.spans import SpanRecord

pytestmark = pytest.mark.mesh

CALLERS = 32
WAIT_S = 60.0
TIMEOUT_S = 60.0


async def call(mesh: RunningMesh, number: int, request: pb.GenerateRequest) -> str:
    """Makes a call with a trace of its own; returns the trace's id."""
    trace_id = f"{0xABCD0000 + number:032x}"
    parent = (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),)
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        stream = InferenceServiceStub(channel).Generate(request, timeout=TIMEOUT_S, metadata=parent)
        with contextlib.suppress(grpc.aio.AioRpcError):  # One of them is refused.
            async for _ in stream:
                pass
    return trace_id


def asked(number: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=8)
    if number == 0:
        return pb.GenerateRequest(prompt="classify: it is late", model="nope", sampling=sampling)
    if number < 4:
        prompt = f"sum: {number} 7 12 40"
        return pb.GenerateRequest(prompt=prompt, labels=CASCADE, sampling=sampling)
    return pb.GenerateRequest(
        prompt=f"classify: order {number} is late", model="small", sampling=sampling
    )


async def test_every_trace_is_whole(mesh: RunningMesh) -> None:
    calls = (call(mesh, number, asked(number)) for number in range(CALLERS))
    wanted = set(await asyncio.gather(*calls))

    def wrong(spans: list[SpanRecord]) -> dict[str, list[str]]:
        known = {(span.trace_id, span.span_id) for span in spans}
        found = {one: [s.of_trace() for s in spans if s.trace_id == one] for one in wanted}
        return {one: told for one, trace in found.items() if (told := faults(trace, known))}

    try:
        await mesh.otlp.wait_for(lambda spans: not wrong(list(spans)), WAIT_S)
    except TimeoutError:
        assert wrong(mesh.otlp.spans.snapshot()) == {}
    roots = [one for one in mesh.otlp.spans.snapshot() if one.trace_id in wanted]
    tried = [
        one.attributes[names.MODELS_TRIED] for one in roots if names.MODELS_TRIED in one.attributes
    ]
    assert ("small", "large") in tried
