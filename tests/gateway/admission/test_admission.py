"""Tenants, workloads and overload, over the wire."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.admission.admission import Admission
from gateway.admission.tenant_limits import TenantLimits
from sluice.errors import Overloaded
from sluice.internal.v1.control_pb2 import ClassReport
from sluice.settings import Settings
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2 import CountTokensRequest
from sluice.v1.safety_pb2 import CheckTextRequest
from tests.gateway.kit.batcher import BOUND_S, last, wire_batcher
from tests.gateway.kit.wire import Wire, error_of, events_of, prompt


def busy(wait_s: float) -> list[ClassReport]:
    return [
        ClassReport(
            priority_class="interactive",
            queued=10,
            queued_tokens=1000,
            expected_wait_ms=wait_s * 1e3,
        )
    ]


async def report(wire: Wire, *models: str, batcher: str = "b1", wait_s: float = 30.0) -> None:
    """Reports, and waits until the gateway has heard of it."""
    slots = 100 + int(batcher[1:])
    await wire.batcher.report(
        *models, batcher=batcher, classes=busy(wait_s), tokens_per_s=1000.0, slots=slots
    )
    async with asyncio.timeout(BOUND_S):
        while True:
            known = (await wire.stub.ListModels(pb.ListModelsRequest())).models
            if all(model.slots == slots for model in known if model.name in models):
                return


async def test_the_task_names_tenant_and_workload(wire: Wire) -> None:
    request = prompt("hello", labels={"task": "summary"})
    call, task = await wire.begin(request, metadata=[("sluice-tenant", "team-a")])
    assert (task.tenant, task.workload) == ("team-a", "summary")
    await wire.end(call, task, "x")
    call, task = await wire.begin(prompt("hello"))
    assert (task.tenant, task.workload) == ("default", "")
    await wire.end(call, task, "x")


async def test_a_name_that_is_no_name_is_refused(wire: Wire) -> None:
    metadata = [("sluice-tenant", "a b")]
    for call in (
        wire.stub.Generate(prompt("hello"), metadata=metadata),
        wire.stub.CountTokens(CountTokensRequest(prompt="hello"), metadata=metadata),
        wire.safety.CheckText(CheckTextRequest(text="hello"), metadata=metadata),
    ):
        _, error = await error_of(call)
        assert error.reason == "REQUEST_INVALID"
        assert [violation.field for violation in error.violations] == ["metadata.sluice-tenant"]


async def test_late_request_is_refused_before_its_task_is_sent(wire: Wire) -> None:
    await report(wire, "small", "large")
    code, error = await error_of(wire.stub.Generate(prompt("hello"), timeout=5.0))
    assert code.name == "RESOURCE_EXHAUSTED"
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == pytest.approx(23.75, abs=1.0)
    call, task = await wire.begin(prompt("hello"), timeout=60.0)
    await wire.end(call, task, "x")


async def test_a_degraded_answer_says_so(wire: Wire, nats_url: str) -> None:
    async with wire_batcher(nats_url, "b2") as other:
        await report(wire, "large")
        await report(wire, "small", batcher="b2", wait_s=0.0)
        request = prompt("hello", model="large", allow_degraded=True)
        call = wire.stub.Generate(request, timeout=20.0)
        task = await other.task("small")
        await other.send(task, last(0, wire.tokens("x")))
        started = (await events_of(call))[0].started
    assert (started.model, started.route.tier, started.route.degraded) == ("small", "small", True)
    assert "s expected of large (" in started.route.reason
    assert "retry" not in started.route.reason


def test_a_second_release_has_no_effect() -> None:
    unused: Any = None
    limits, settled = TenantLimits(Settings, lambda: 0.0), list[float]()
    admission = Admission(unused, unused, unused, limits, unused, unused, unused)
    context: Any = SimpleNamespace(tenant="acme", settles=[lambda used, _: settled.append(used)])
    for used in (5, 7):
        admission.release(context, used)
    assert settled == [5]
