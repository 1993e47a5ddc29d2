"""What one tenant, or a process of the mesh, costs the other tenants of a gateway: counted in calls, not in time."""

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import grpc
import nats
import pytest

from sluice.internal.v1.frame_pb2 import Frame, FrameBundle
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from sluice.wire import subjects
from sluice.wire.codec import BUNDLE_FRAMES_MAX
from tests.robustness.gateway_process import BOUND_S, Target, gateway

CROWD: Final = 300
CALLS_BEFORE: Final = 20
AHEAD_MAX: Final = 60
"""Calls of the crowd that may end before another tenant's: it has as many as callers in flight, and all of
them ended before when nobody gave turns."""
PROMPTS: Final = {"in the loop": "one two " * 110, "in threads": "a1@b.co " * 990}
BUNDLES: Final = 200
GATEWAY: Final = "attacked"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, nats_server: str) -> Iterator[Target]:
    with gateway(tmp_path_factory.mktemp("tenants"), nats_server, gateway_id=GATEWAY) as opened:
        yield opened


async def count_tokens(channel: grpc.aio.Channel, tenant: str, prompt: str) -> int:
    stub: Any = InferenceServiceStub(channel)
    request = pb.CountTokensRequest(prompt=prompt, model="small")
    metadata = (("sluice-tenant", tenant),)
    return int((await stub.CountTokens(request, timeout=BOUND_S, metadata=metadata)).token_count)


@pytest.mark.long
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
async def test_crowd_of_one_tenant_goes_before_another_by_few_calls(
    target: Target, prompt: str
) -> None:
    ended, enough = 0, asyncio.Event()

    async def ask_again(channel: grpc.aio.Channel) -> None:
        nonlocal ended
        while True:
            await count_tokens(channel, "crowd", prompt)
            ended += 1
            if ended == CALLS_BEFORE:
                enough.set()

    async with target.channel() as crowd, target.channel() as other:
        await count_tokens(other, "quiet", "hello")
        callers = [asyncio.create_task(ask_again(crowd)) for _ in range(CROWD)]
        async with asyncio.timeout(BOUND_S):
            await enough.wait()
        ahead = []
        for _ in range(5):
            before = ended
            await count_tokens(other, "quiet", "hello")
            ahead.append(ended - before)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    assert sorted(ahead)[2] <= AHEAD_MAX, ahead


def frames_of_nobody(number: int) -> bytes:
    frames = [Frame(request_id=f"{number}-{at}", attempt=1, token_ids=[1]) for at in range(5_000)]
    return FrameBundle(batcher="hostile", frames=frames).SerializeToString()


def too_many_frames(_: int) -> bytes:
    frames = [Frame()] * (BUNDLE_FRAMES_MAX + 1)
    return FrameBundle(batcher="hostile", frames=frames).SerializeToString()


MAKERS: Final = {"unknown requests": frames_of_nobody, "too many": too_many_frames}


@pytest.mark.long
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
async def test_frames_that_nobody_asked_for_are_dropped(
    target: Target, nats_server: str, make: Any
) -> None:
    client = await nats.connect(nats_server)
    subject = subjects.frames(GATEWAY)
    with target.grows_little():
        for number in range(BUNDLES):
            await client.publish(subject, make(number))
        await client.flush()
        await target.check()
    await client.close()
