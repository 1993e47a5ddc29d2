"""A gateway is killed in the middle of an answer: the client's answer is that of an undisturbed run."""

import asyncio
import os
import signal
from typing import Final

import pytest

from sluice.client import Answer, AnswerBuilder, AsyncClient, Delta, GenerateOptions, NoticeKind
from sluice.settings import GatewaySettings, ModelSettings, Settings
from sluice.settings.routing import RoutingSettings
from supervisor.mesh import Mesh, running_mesh
from tests.support.mesh import kill, stubs_of

pytestmark = pytest.mark.mesh

MODEL: Final = "large"
PROMPT: Final = "Write a polite reply.\nHi there, My order is D-91198. Please do not send it."
SETTINGS: Final = Settings(
    models=(ModelSettings(name=MODEL, tier=MODEL, path="builtin:large", slots=8),),
    routing=RoutingSettings(default=MODEL),
    gateway=GatewaySettings(address="127.0.0.1:0"),
)
BOUND_S: Final = 240.0
TRIES: Final = 3


SAMPLED: Final[GenerateOptions] = {
    "model": MODEL,
    "seed": 7,
    "temperature": 2.0,
    "max_tokens": 300,
    "min_tokens": 300,
    "timeout_s": BOUND_S,
}
"""Hundreds of draws, each of which depends on its seed and place."""


@pytest.mark.long
@pytest.mark.timeout(3 * TRIES * BOUND_S)
async def test_answer_goes_on_after_the_gateway_was_killed() -> None:
    for _ in range(TRIES):
        undisturbed, disturbed = await answers_without_and_with_a_kill()
        assert disturbed.token_ids == undisturbed.token_ids
        assert disturbed.text == undisturbed.text
        if NoticeKind.RECONNECTED in [notice.kind for notice in disturbed.notices]:
            return
        # This process was so slow that the whole answer had come before the kill.
    pytest.fail(f"the gateway was killed too late {TRIES} times")


async def answers_without_and_with_a_kill() -> tuple[Answer, Answer]:
    async with running_mesh(SETTINGS) as mesh, AsyncClient(mesh.address) as client:
        undisturbed = await client.generate(PROMPT, **SAMPLED).answer()
        disturbed = await asyncio.wait_for(kill_midway(mesh, client), BOUND_S)
    return undisturbed, disturbed


async def kill_midway(mesh: Mesh, client: AsyncClient) -> Answer:
    """The answer to the same request; the gateway dies when its first tokens have come."""
    builder = AnswerBuilder()
    killed = False
    async with client.generate(PROMPT, **SAMPLED) as stream:
        async for event in stream:
            builder.add(event)
            if isinstance(event, Delta) and not killed:
                killed = True
                kill_gateway(mesh)
    return builder.build()


def kill_gateway(mesh: Mesh) -> None:
    """Holds the engine meanwhile, so that it cannot be done before the gateway is gone."""
    stub = stubs_of(mesh)[MODEL]
    os.kill(stub, signal.SIGSTOP)
    try:
        kill(mesh, "gateway")
    finally:
        os.kill(stub, signal.SIGCONT)
