"""Two gateways of one mesh: each is killed under load, and no call of the SDK fails."""

import asyncio
from typing import Final

import pytest

from sluice.client import AsyncClient, Delta, Notice, NoticeKind
from sluice.settings import Settings
from supervisor.mesh import Mesh, running_mesh
from supervisor.status import report_of
from tests.support.mesh import kill

pytestmark = [pytest.mark.mesh, pytest.mark.long]

CALLERS: Final = 8
BOUND_S: Final = 60.0
PROMPT: Final = "one two three four five " * 8
SETTINGS: Final = Settings.model_validate(
    {
        "models": [
            {
                "name": "echo",
                "path": "builtin:small",
                "engine": "echo",
                "echo_step_ms": 100,
                "slots": 64,
            }
        ],
        "routing": {"default": "echo"},
        "gateway": {"address": "127.0.0.1:0", "drain_s": 2, "replicas": 2},
        "batcher": {"drain_s": 2},
    }
)


async def answer(client: AsyncClient, streaming: asyncio.Event) -> tuple[str, bool]:
    """The text, and whether another call had to continue it."""
    text, reconnected = "", False
    stream = client.generate(
        PROMPT, model="echo", max_tokens=100, min_tokens=100, timeout_s=BOUND_S
    )
    async with stream:
        async for event in stream:
            if isinstance(event, Delta):
                text += event.text
                streaming.set()
            elif isinstance(event, Notice):
                reconnected |= event.kind is NoticeKind.RECONNECTED
    return text, reconnected


async def test_a_gateway_that_is_killed_costs_no_call() -> None:
    async with running_mesh(SETTINGS) as mesh:
        assert mesh.address.count(",") == 1
        async with AsyncClient(mesh.address) as client:
            calm, _ = await answer(client, asyncio.Event())
            for name in ("gateway", "gateway.1"):
                streaming = asyncio.Event()
                calls = [asyncio.ensure_future(answer(client, streaming)) for _ in range(CALLERS)]
                await streaming.wait()
                kill(mesh, name)
                texts, reconnected = zip(*await asyncio.gather(*calls), strict=True)
                assert set(texts) == {calm}
                assert any(reconnected)
                await ready(mesh)
        restarts = {one.name: one.restarts for one in mesh.supervisor.states}
        assert (restarts["gateway"], restarts["gateway.1"]) == (1, 1)


async def ready(mesh: Mesh) -> None:
    async with asyncio.timeout(BOUND_S):
        while (await report_of(mesh.state_dir)).problem:
            pass
