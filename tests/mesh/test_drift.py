"""Drift as an operator sees it: on the page for Prometheus, as an event, in the log, and with one command."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.support.meshes import echo
from gateway.routing.learned.artefact import save_to
from learning.train import train
from sluice import settings as config
from sluice.client import AsyncClient
from sluice.errors import RecordUnknown
from sluice.settings.routing import RoutingSettings
from sluice.v1 import admin_pb2 as pb
from supervisor.control import reload_mesh
from supervisor.mesh import Mesh, running_mesh
from tests.cli.commands import BOUND_S, process
from tests.learning.made_up import EASY, outcomes
from tests.support.mesh import quick_settings

pytestmark = pytest.mark.mesh

GRADED = 60
TOGETHER = 8


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "made_up.router"
    save_to(train(outcomes(300), seed=1), path)
    return path


@pytest_asyncio.fixture
async def mesh(artefact: Path) -> AsyncIterator[Mesh]:
    learned = {
        "artefact": str(artefact),
        "weak": "small",
        "strong": "large",
        "target": {"strong_share": 0.5},
    }
    settings = quick_settings(
        *(echo(64, name=name) for name in ("small", "large")),
        routing=RoutingSettings.model_validate({"learned": learned}),
        telemetry=config.TelemetrySettings(prometheus={"gateway": "127.0.0.1:0"}),
    )
    async with running_mesh(settings) as running:
        yield running


@pytest.mark.long
async def test_an_operator_sees_that_prompts_and_grades_have_changed(mesh: Mesh) -> None:
    async with AsyncClient(mesh.address) as client:
        await ask(client, [row.prompt for row in outcomes(240, seed=3)])
        assert (await client.router_health())[0].inputs.state == pb.DRIFT_STATE_STABLE
        page = await scrape(mesh)
        assert value(page, "sluice_router_input_drift{") < 0.5
        assert drifted(page) == set()
        request_ids = await ask(client, [f"{EASY} {number}" for number in range(400)])
        for request_id in request_ids[:GRADED]:
            await grade(client, request_id, 0.0)
    page = await scrape(mesh)
    assert value(page, "sluice_router_input_drift{") > 1
    assert value(page, "sluice_router_accuracy_bias{") < -0.5
    assert drifted(page) == {"inputs", "accuracy"}
    assert "sluice_requests_total{" in page
    await reloaded(mesh)
    for command in (("drift",), ("status", "--state-dir", str(mesh.state_dir.root))):
        async with process(mesh.address, *command) as running:
            out, _ = await asyncio.wait_for(running.communicate(), BOUND_S)
        assert out.decode().count("drifted") == 2


async def ask(client: AsyncClient, prompts: list[str]) -> list[str]:
    """The request ids of the answers."""
    limit = asyncio.Semaphore(TOGETHER)

    async def one(prompt: str) -> str:
        async with limit:
            return (await client.generate(prompt, max_tokens=2).answer()).request_id

    return await asyncio.gather(*map(one, prompts))


async def grade(client: AsyncClient, request_id: str, value: float) -> None:
    """Tries until the record has been written."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                return await client.feedback(request_id, value)
            except RecordUnknown:
                await asyncio.sleep(0.02)


async def reloaded(mesh: Mesh) -> None:
    """What was a free port in the file, and what is known of a router, stays."""
    open_ports = config.TelemetrySettings(prometheus={"gateway": "127.0.0.1:0"})
    path = mesh.state_dir.root / "again.yaml"
    path.write_text(mesh.settings.model_copy(update={"telemetry": open_ports}).to_yaml())
    await asyncio.to_thread(reload_mesh, mesh.state_dir, path)
    assert value(await scrape(mesh), "sluice_router_input_drift{") > 1


async def scrape(mesh: Mesh) -> str:
    def read() -> str:
        page = f"http://{mesh.settings.telemetry.prometheus.get('gateway')}/metrics"
        with urllib.request.urlopen(page, timeout=BOUND_S) as response:
            return str(response.read().decode())

    return await asyncio.to_thread(read)


def value(page: str, beginning: str) -> float:
    """Of the only line that begins so."""
    (line,) = [line for line in page.splitlines() if line.startswith(beginning)]
    return float(line.rpartition(" ")[2])


def drifted(page: str) -> set[str]:
    """The signals that have drifted."""
    lines = [line for line in page.splitlines() if line.startswith("sluice_router_drifted{")]
    assert len(lines) == 2
    on = [line for line in lines if float(line.rpartition(" ")[2])]
    return {line.partition('sluice_drift_signal="')[2].partition('"')[0] for line in on}
