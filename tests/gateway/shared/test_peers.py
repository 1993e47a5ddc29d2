"""Gateways that know each other: ids, sums of counts, spending. Real gateways, a real nats-server."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest

from gateway.shared.peers import Peers
from sluice.errors import SetupError
from sluice.internal.v1.gateway_pb2 import GatewayHeartbeat, GatewayQuery, IdentityQuery
from sluice.v1.admin_pb2 import GetRouterHealthRequest, ListTenantsRequest
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.v1.safety_pb2 import GetDryRunRequest
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.wire import Wire, events_of, open_wire, prompt, tokens_of

ROUTING = {
    "default": "large",
    "budgets": [{"tenants": ["acme"], "per_hour": 0.1, "model": "small"}],
}
PRICES = {"large": (0.0, 1e6)}
ACME = (("sluice-tenant", "acme"),)
TRIAL = {"policies": {"default": {}, "strict": {"severity": {"low": "block"}}}, "dry_run": "strict"}


async def know_each_other(one: Wire, two: Wire) -> None:
    await one.until(lambda: one.gateway.shared.peers.alive == [two.gateway.shared.peers.gateway_id])
    await two.until(lambda: two.gateway.shared.peers.alive == [one.gateway.shared.peers.gateway_id])


@pytest.fixture
async def pair(nats_url: str, model_folder: Path) -> AsyncIterator[tuple[Wire, Wire]]:
    common: dict[str, Any] = {"routing": ROUTING, "prices": PRICES, "safety": TRIAL}
    async with (
        open_wire(nats_url, model_folder, gateway_id="gw1", **common) as one,
        open_wire(nats_url, model_folder, gateway_id="gw2", **common) as two,
    ):
        await know_each_other(one, two)
        yield one, two


async def test_an_id_in_use_is_refused(wire: Wire, nats_url: str, model_folder: Path) -> None:
    with pytest.raises(SetupError, match="--id: gateway 'gw1' is running"):
        async with open_wire(nats_url, model_folder, gateway_id="gw1"):
            pass
    assert wire.gateway.shared.peers.alive == []


async def test_a_gateway_that_leaves_is_forgotten_at_once(
    wire: Wire, nats_url: str, model_folder: Path
) -> None:
    async with open_wire(nats_url, model_folder, gateway_id="gw2") as two:
        await know_each_other(wire, two)
    await wire.until(lambda: wire.gateway.shared.peers.alive == [])
    assert (
        await wire.gateway.shared.peers.query("gw2", GatewayQuery(identity=IdentityQuery())) is None
    )


@pytest.mark.parametrize("field", ["reserved", "running"])
async def test_a_heartbeat_of_too_many_tenants_leaves_them_out(
    wire: Wire, nats_url: str, field: str
) -> None:
    class Part:
        def add_to(self, heartbeat: GatewayHeartbeat) -> None:
            getattr(heartbeat, field).update({f"tenant-{n:060}": 1 for n in range(30_000)})

        def on_heartbeat(self, heartbeat: GatewayHeartbeat) -> None:
            pass

    async def nothing() -> None:
        pass

    peers, client = Peers("gw2"), await nats.connect(nats_url)
    await peers.start(client, {}, [Part()], nothing)
    await wire.until(lambda: wire.gateway.shared.peers.alive == ["gw2"])
    await client.close()


async def test_what_each_has_counted_is_summed(pair: tuple[Wire, Wire]) -> None:
    for wire in pair:
        call = wire.stub.Generate(prompt("write to ann@example.org", model="small"))
        task = await wire.batcher.task()
        await wire.batcher.send(task, last(0, wire.tokens("hello")))
        await events_of(call)
    for wire in pair:
        counts = await wire.safety.GetDryRun(GetDryRunRequest())
        assert (counts.texts, counts.changed) == (4, 2)  # prompts and answers
        assert sorted(counts.gateways) == ["gw1", "gw2"]
    health = await AdminServiceStub(pair[1].channel).GetRouterHealth(GetRouterHealthRequest())
    assert (health.gateway, list(health.gateways)) == ("gw2", ["gw2", "gw1"])


async def test_a_budget_holds_for_all_gateways_and_after_a_restart(
    pair: tuple[Wire, Wire], nats_url: str, model_folder: Path
) -> None:
    one, two = pair

    def spent(wire: Wire) -> float:
        return wire.gateway.limits.spending.spent("acme", time.monotonic())

    call = one.stub.Generate(prompt(model=""), metadata=ACME)
    task = await one.batcher.task("large")
    await two.until(lambda: spent(two) > 1)  # reserved
    await one.batcher.send(task, last(0, one.tokens("hello")))
    await events_of(call)
    cost = spent(one)
    await two.until(lambda: spent(two) == cost)
    call = two.stub.Generate(prompt(model=""), metadata=ACME)
    task = await two.batcher.task("small")
    await two.batcher.send(task, last(0, two.tokens("hello")))
    assert (await events_of(call))[0].started.model == "small"
    await one.gateway.shared.usage.write()
    async with open_wire(
        nats_url, model_folder, gateway_id="gw3", routing=ROUTING, prices=PRICES
    ) as three:
        assert spent(three) == cost


async def test_costs_are_told_where_nothing_limits_them(nats_url: str, model_folder: Path) -> None:
    async with (
        open_wire(nats_url, model_folder, gateway_id="gw1", prices=PRICES) as one,
        open_wire(nats_url, model_folder, gateway_id="gw2", prices=PRICES) as two,
    ):
        call = one.stub.Generate(prompt(model="large"), metadata=ACME)
        task = await one.batcher.task("large")
        await one.batcher.send(task, last(0, one.tokens("hello")))
        await events_of(call)
        request = ListTenantsRequest(tenant="acme")
        cost = (await AdminServiceStub(one.channel).ListTenants(request)).tenants[0].cost_last_hour
        spending = two.gateway.limits.spending
        await two.until(lambda: spending.spent("acme", time.monotonic()) == cost > 0)


async def test_a_resume_key_that_nobody_names_is_that_of_all_gateways(
    nats_url: str, model_folder: Path
) -> None:
    async with (
        open_wire(nats_url, model_folder, gateway_id="gw1", resume_key=None) as one,
        open_wire(nats_url, model_folder, gateway_id="gw2", resume_key=None) as two,
    ):
        call = one.stub.Generate(prompt())
        task = await one.batcher.task()
        answer = one.tokens("hello world")
        await one.batcher.send(task, frame(0, answer[:1]))
        started = (await call.read()).started
        delta = (await call.read()).delta
        call.cancel()
        request = prompt()
        request.resume.token_ids.extend(delta.token_ids)
        request.resume.model, request.resume.seed = started.model, started.seed
        request.resume.resume_token = delta.resume_token
        again = two.stub.Generate(request)
        while (task := await two.batcher.task()).gateway != "gw2":
            pass
        await two.batcher.send(task, last(1, answer[1:]))
        assert tokens_of(await events_of(again)) == answer[1:]
