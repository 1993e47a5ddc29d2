"""Models are added, replaced, rolled back and removed while callers stream: no stream is lost, none changes."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sluice.client.aio import AsyncClient
from sluice.errors import SettingsError, SetupError, UnknownModel
from sluice.settings import Settings, load, resolve_model_path
from supervisor.control import reload_mesh
from supervisor.mesh import Mesh, running_mesh
from supervisor.reload import Reloaded
from tests.support.mesh import kill

pytestmark = [pytest.mark.mesh, pytest.mark.long, pytest.mark.timeout(600)]

BOUND_S = 120.0
CALLERS = 2
TOKENS = 80
PROMPT = "one two three four five six seven eight nine ten " * 8
SMALL: dict[str, Any] = {
    "name": "small",
    "path": "builtin:small",
    "engine": "echo",  # so that loading takes no longer than it must
    "echo_step_ms": 20,
    "slots": 8,
}
ECHO: dict[str, Any] = {"name": "echo", "path": "builtin:small", "engine": "echo"}


def settings_of(*models: dict[str, Any]) -> dict[str, Any]:
    return {
        "models": list(models),
        "routing": {"default": "small"},
        "gateway": {"address": "127.0.0.1:0", "drain_s": 2, "replicas": 2},
        "batcher": {"drain_s": 2},
        "jobs": {"replicas": 0},
        "telemetry": {"prometheus": {"triton": "127.0.0.1:0"}, "log_format": "json"},
    }


class Callers:
    """Callers that stream one answer after the other."""

    def __init__(self, mesh: Mesh) -> None:
        self.texts: list[str] = []
        self._mesh = mesh
        self._stop = False

    async def _ask(self) -> None:
        async with AsyncClient(self._mesh.address) as client:
            while not self._stop:
                self.texts.append(await answer(client))

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Callers"]:
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._ask())
            yield self
            self._stop = True


async def answer(client: AsyncClient, model: str = "small") -> str:
    stream = client.generate(
        PROMPT, model=model, max_tokens=TOKENS, min_tokens=TOKENS, timeout_s=BOUND_S
    )
    return (await stream.answer()).text


async def reloaded(mesh: Mesh, *models: dict[str, Any]) -> Reloaded:
    file = mesh.state_dir.root / "changed.yaml"
    file.write_text(yaml.safe_dump(settings_of(*models)))
    return await asyncio.to_thread(reload_mesh, mesh.state_dir, file)


def workers(mesh: Mesh) -> set[str]:
    """Those that run, or are started again."""
    return {one.name for one in mesh.supervisor.states if one.name.startswith("triton")}


async def pages(mesh: Mesh) -> dict[str, str]:
    """What Prometheus reads of each process that its file names."""
    found = json.loads(mesh.state_dir.targets.read_text())
    async with httpx.AsyncClient() as client:
        return {
            one["labels"]["process"]: (await client.get(f"http://{one['targets'][0]}/metrics")).text
            for one in found
        }


async def workers_are(mesh: Mesh, *names: str) -> None:
    await mesh.supervisor.wait_for(lambda: workers(mesh) == set(names), BOUND_S)


async def test_models_change_while_callers_stream(tmp_path: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(resolve_model_path("builtin:small"), second)
    asked = Settings.model_validate(settings_of(SMALL))
    async with running_mesh(asked, tmp_path / "state") as mesh, AsyncClient(mesh.address) as client:
        alone = await answer(client)
        async with Callers(mesh).running() as callers:
            # Replaced: the new version beside the old one, whose worker dies before its last row has ended.
            done = await reloaded(mesh, SMALL | {"path": str(second)})
            assert done.models == {"small": "replaced"}
            assert workers(mesh) == {"triton-small", "triton-small--1"}
            kill(mesh, "triton-small")
            await workers_are(mesh, "triton-small--1")
            # A version that cannot be loaded leaves the one before; so does a file that cannot work.
            with pytest.raises(SetupError, match="triton-small--2 ended while starting"):
                await reloaded(mesh, SMALL | {"engine": "transformers", "device": "cuda:77"})
            with pytest.raises(SettingsError, match=r"models\.1: echo: "):
                await reloaded(mesh, SMALL | {"path": str(second)}, ECHO | {"path": "/nowhere"})
            assert workers(mesh) == {"triton-small--1"}
            # Added, and the first version comes back.
            done = await reloaded(mesh, SMALL, ECHO)
            assert done.models == {"small": "replaced", "echo": "added"}
            assert await answer(client, "echo")
            await workers_are(mesh, "triton-small--3", "triton-echo")
            read = await pages(mesh)
            assert read.keys() == {"triton-small--3", "triton-echo"}
            assert 'nv_inference_request_success{model="echo"' in read["triton-echo"]
            # Removed; with that the former gateways' records say so too.
            assert (await reloaded(mesh, SMALL)).models == {"echo": "removed"}
            await workers_are(mesh, "triton-small--3")
            with pytest.raises(UnknownModel):
                await answer(client, "echo")
            kill(mesh, "gateway")
            callers.texts.append(await answer(client))
        assert len(callers.texts) > CALLERS
        assert set(callers.texts) == {alone}
        assert load(mesh.state_dir.config).retiring == ()
