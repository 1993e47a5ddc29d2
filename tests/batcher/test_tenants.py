"""Shares of tenants whose tasks wait in a batcher, with a real nats-server."""

import asyncio

from sluice.internal.v1 import task_pb2
from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble
from tests.batcher.tritons import MortalTriton

MANY, FEW = 1200, 60
BOUND_S = 60.0


async def queued(gateway: GatewayDouble, tenant: str, count: int) -> list[task_pb2.Task]:
    """Tasks of ``tenant``, sent."""
    tasks = [
        gateway.task(max_tokens=20, priority_class="bulk", timeout_s=None) for _ in range(count)
    ]
    for task in tasks:
        task.tenant = tenant
    await asyncio.gather(*map(gateway.publish, tasks))
    return tasks


async def test_a_tenant_with_many_waiting_tasks_delays_no_other(
    nats_url: str, gateway: GatewayDouble, echo_triton: MortalTriton
) -> None:
    many = await queued(gateway, "many", MANY)
    few = await queued(gateway, "few", FEW)

    def done(tasks: list[task_pb2.Task]) -> int:
        return sum(gateway.answers[task.request_id].final is not None for task in tasks)

    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        await gateway.until(lambda: done(few) == FEW, BOUND_S)
        served = done(many)
    assert served <= 1.1 * FEW + ECHO.slots, "equal weights, equal tokens"
    assert served >= 0.9 * FEW - ECHO.slots


async def test_a_tenant_that_comes_late_gets_its_share_at_once(
    nats_url: str, gateway: GatewayDouble, echo_triton: MortalTriton
) -> None:
    many = await queued(gateway, "many", MANY)

    def done(tasks: list[task_pb2.Task]) -> int:
        return sum(gateway.answers[task.request_id].final is not None for task in tasks)

    async with running_batcher(settings_of(nats_url, echo_triton.address, ECHO)):
        await gateway.until(lambda: done(many) >= 32, BOUND_S)
        before = done(many)
        few = await queued(gateway, "few", FEW)
        await gateway.until(lambda: done(few) == FEW, BOUND_S)
        served = done(many) - before
    assert served < MANY / 2
