"""The loop closes: requests are answered and shadowed, some are graded, a router is learned from them and routes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import pytest_asyncio

from gateway.routing.learned.artefact import load
from model_workers.tiers.example import Cell, Example
from model_workers.tiers.tasks import generate
from sluice import settings as config
from sluice.client.aio import AsyncClient
from sluice.errors import RecordUnknown
from sluice.settings.routing import RoutingSettings
from sluice.v1.admin_pb2 import OUTCOME_SOURCE_GRADE, RequestRecord, StreamOutcomesResponse
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_LEARNED
from supervisor.mesh import Mesh, running_mesh
from tests.cli.commands import Cli

pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

BOUND_S = 60.0
KINDS: tuple[Cell, ...] = (("classify", "easy"), ("sort", "hard"))
EACH = 18
"""Questions of a kind."""
AT_ONCE = 12
ROUTING = {
    "default": "small",
    "shadows": [{"model": "large", "of": "small", "share": 1}],
    "outcomes": {"tenants": ["acme"], "pair": ["small", "large"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    settings = config.Settings(
        routing=RoutingSettings.model_validate(ROUTING),
        gateway=config.GatewaySettings(address="127.0.0.1:0", drain_s=1.0),
        batcher=config.BatcherSettings(drain_s=1.0),
    )
    async with running_mesh(settings, tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest.mark.long
async def test_a_router_is_learned_from_own_traffic_and_routes_it(
    mesh: Mesh, cli: Cli, tmp_path: Path
) -> None:
    easy, hard = (generate(7, EACH, (kind, level)) for kind, level in KINDS)
    async with AsyncClient(mesh.address, tenant="acme") as client:
        room = asyncio.Semaphore(AT_ONCE)
        asked = [ask(client, example, room) for example in (*easy, *hard)]
        grades = dict(await asyncio.gather(*asked))
        listed = await complete(client, len(asked))
        assert {row.request_id: row.weak for row in listed} == grades
        assert all(row.weak_source == OUTCOME_SOURCE_GRADE for row in listed)
        assert {row.weak for row in listed} == {0.0, 1.0}

        router = tmp_path / "own.router"
        address = ("--address", mesh.address, "--json")
        ran = await cli("router", "train", "--from-mesh", "--out", str(router), *address)
        assert ran.code == 0, ran.err
        told = json.loads(ran.out)
        assert told["outcomes"] == len(asked)

        learned = {
            "artefact": str(router),
            "weak": "small",
            "strong": "large",
            "target": {"strong_share": 0.5},
        }
        changed = config.load(mesh.state_dir.config).model_dump(mode="json")
        changed["routing"] = {**ROUTING, "learned": learned}
        path = tmp_path / "sluice.yaml"
        path.write_text(json.dumps(changed))
        state = ("--state-dir", str(mesh.state_dir.root))
        ran = await cli("reload", "--config", str(path), *state)
        assert ran.code == 0, ran.err

        # Which answers of the small model are right differs between machines, and with it what 36 rows teach about a
        # single prompt. So the gateway is compared with the router itself, on its lowest and its highest gain.
        gains = {one.prompt: load(router).prompts.score(one.prompt).gain for one in (*easy, *hard)}
        assert fmean(gains[one.prompt] for one in hard) > fmean(gains[one.prompt] for one in easy)
        lowest, *_, highest = sorted(gains, key=gains.__getitem__)
        for prompt, model in ((lowest, "small"), (highest, "large")):
            answer = await client.generate(prompt, max_tokens=4, timeout_s=BOUND_S).answer()
            record = await explained(client, answer.request_id)
            assert record.route.strategy == ROUTE_STRATEGY_LEARNED
            assert record.route.versions["router"] == told["version"][:12]
            assert answer.model == model


async def ask(client: AsyncClient, example: Example, room: asyncio.Semaphore) -> tuple[str, float]:
    """The request, and how good its answer was, which the mesh is told."""
    async with room:
        stream = client.generate(example.prompt, max_tokens=example.max_tokens, timeout_s=BOUND_S)
        answer = await stream.answer()
        assert answer.model == "small"
        grade = float(example.grade(answer.text))
        (run,) = (await explained(client, answer.request_id, lambda one: one.shadows)).shadows
        assert not run.dropped
        await client.feedback(answer.request_id, grade)
        return answer.request_id, grade


async def explained(
    client: AsyncClient, request_id: str, wanted: Callable[[RequestRecord], Any] = lambda _: True
) -> RequestRecord:
    """The record, once it is as ``wanted``."""
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(RecordUnknown):
                record = (await client.explain(request_id)).record
                if wanted(record):
                    return record
            await asyncio.sleep(0.02)


async def complete(client: AsyncClient, count: int) -> list[StreamOutcomesResponse]:
    """The outcomes, once ``count`` have both sides."""
    async with asyncio.timeout(BOUND_S):
        while True:
            listed = [row async for row in client.outcomes(["acme"])]
            both = [row for row in listed if row.HasField("strong")]
            if len(both) == count:
                return both
            await asyncio.sleep(0.2)
