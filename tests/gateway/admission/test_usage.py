"""Spending and failures, from calls to the next routing decision; before a real nats-server."""

from pathlib import Path

from sluice.internal.v1.frame_pb2 import ROW_END_FAILED, RowError
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.wire import error_of, events_of, open_wire, prompt

ROUTING = {
    "default": "large",
    "breaker": {"failures": 2, "open_s": 60.0},
    "budgets": [{"tenants": ["acme"], "per_hour": 0.1, "model": "small"}],
    "fallbacks": {"large": ["small"]},
}
ACME = (("sluice-tenant", "acme"),)


async def test_a_model_that_fails_is_left_alone(nats_url: str, model_folder: Path) -> None:
    async with open_wire(nats_url, model_folder, routing=ROUTING) as wire:
        for _ in range(2):
            call = wire.stub.Generate(prompt(model="large"))
            task = await wire.batcher.task("large")
            broken = RowError(reason="ENGINE_FAILED", message="no luck")
            await wire.batcher.send(task, frame(0, end=ROW_END_FAILED, error=broken))
            assert (await error_of(call))[1].reason == "ENGINE_FAILED"
        _, error = await error_of(wire.stub.Generate(prompt(model="large")))
        assert error.reason == "MODEL_UNAVAILABLE"
        assert error.retry_after_s is not None
        assert error.retry_after_s > 50
        call = wire.stub.Generate(prompt(model="large", allow_degraded=True))
        task = await wire.batcher.task("small")
        await wire.batcher.send(task, last(0, wire.tokens("hello")))
        started = (await events_of(call))[0].started
        assert (started.model, started.route.degraded) == ("small", True)


async def test_a_tenant_over_its_budget_gets_the_smaller_model(
    nats_url: str, model_folder: Path
) -> None:
    prices = {"large": (0.0, 1e6)}
    async with open_wire(nats_url, model_folder, routing=ROUTING, prices=prices) as wire:
        for tenant, model in ((ACME, "large"), (ACME, "small"), ((), "large")):
            call = wire.stub.Generate(prompt(model=""), metadata=tenant)
            task = await wire.batcher.task(model)
            await wire.batcher.send(task, last(0, wire.tokens("hello")))
            assert (await events_of(call))[0].started.model == model


PRICES = {"large": (0.0, 1e6)}


async def test_concurrent_calls_do_not_overshoot_a_budget(
    nats_url: str, model_folder: Path
) -> None:
    async with open_wire(nats_url, model_folder, routing=ROUTING, prices=PRICES) as wire:
        calls = [wire.stub.Generate(prompt(model=""), metadata=ACME) for _ in range(4)]
        task = await wire.batcher.task("large")
        for _ in range(3):
            other = await wire.batcher.task("small")
            await wire.batcher.send(other, last(0, wire.tokens("hello")))
        await wire.batcher.send(task, last(0, wire.tokens("hello")))
        models = [(await events_of(call))[0].started.model for call in calls]
        assert sorted(models) == ["large", "small", "small", "small"]


async def test_a_refused_request_reserves_nothing(nats_url: str, model_folder: Path) -> None:
    async with open_wire(nats_url, model_folder, routing=ROUTING, prices=PRICES) as wire:
        call = wire.stub.Generate(prompt("x" * 20_000, model=""), metadata=ACME)
        assert (await error_of(call))[1].reason == "PROMPT_TOO_LONG"
        call = wire.stub.Generate(prompt(model=""), metadata=ACME)
        task = await wire.batcher.task("large")
        await wire.batcher.send(task, last(0, wire.tokens("hello")))
        assert (await events_of(call))[0].started.model == "large"


async def test_naming_a_model_does_not_skip_the_budget(nats_url: str, model_folder: Path) -> None:
    async with open_wire(nats_url, model_folder, routing=ROUTING, prices=PRICES) as wire:
        call = wire.stub.Generate(prompt(model="large"), metadata=ACME)
        task = await wire.batcher.task("large")
        await wire.batcher.send(task, last(0, wire.tokens("hello")))
        await events_of(call)
        code, error = await error_of(wire.stub.Generate(prompt(model="large"), metadata=ACME))
        assert (code.name, error.reason) == ("RESOURCE_EXHAUSTED", "BUDGET_SPENT")
        assert error.retry_after_s is not None
        for request in (prompt(model="large", allow_degraded=True), prompt(model="small")):
            call = wire.stub.Generate(request, metadata=ACME)
            task = await wire.batcher.task("small")
            await wire.batcher.send(task, last(0, wire.tokens("hello")))
            assert (await events_of(call))[0].started.model == "small"
