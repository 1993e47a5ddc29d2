"""Streams through the whole mesh: many at once say what each says alone, and their time is accounted for."""

import asyncio

import grpc
import pytest

from model_workers.tiers.tasks import heldout
from sluice.client import AsyncClient
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.wire.clock import ms_of
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

TIMEOUT_S = 90.0


@pytest.mark.parametrize("streams", [8, pytest.param(64, marks=pytest.mark.long)])
async def test_concurrent_streams_say_what_each_says_alone(mesh: RunningMesh, streams: int) -> None:
    async with AsyncClient(mesh.address) as client:
        asked = [
            client.generate(
                example.prompt, model="small", max_tokens=example.max_tokens, timeout_s=TIMEOUT_S
            )
            for example in heldout(n_per_cell=-(-streams // 7), seed=11)[:streams] * 2
        ]
        alone = [(await stream.answer()).text for stream in asked[:streams]]
        together = await asyncio.gather(*(stream.answer() for stream in asked[streams:]))
    assert [answer.text for answer in together] == alone


@pytest.mark.parametrize("tokens", [1, 48])
async def test_every_millisecond_of_an_answer_is_named(mesh: RunningMesh, tokens: int) -> None:
    sampling = pb.SamplingParams(min_tokens=tokens, max_tokens=tokens)
    request = pb.GenerateRequest(prompt="order 7 is late", model="small", sampling=sampling)
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        stream = InferenceServiceStub(channel).Generate(request, timeout=TIMEOUT_S)
        timings = [event.finished.timings async for event in stream][-1]
    ms = {field.name: ms_of(value) for field, value in timings.ListFields()}
    total, _ = ms.pop("total"), ms.pop("time_to_first_token")
    assert sum(ms.values()) == pytest.approx(total, abs=0.01), ms
    assert all(ms[name] > 0 for name in ("admission", "queue", "batch", "prefill", "delivery"))
    assert (ms["decode"] > 0) == (tokens > 1)
