"""Many calls of one tenant at once, and a call of another behind them: over gRPC, with the test as batcher."""

from typing import Final

from tests.gateway.kit.wire import Wire, prompt

CROWD: Final = 192
PASSED_MAX: Final = 3 * CROWD // 4
"""Calls of the crowd that may begin before the other. A round for each `ARRIVALS` calls, 24 to 48, where all arrive
together; more where the machine is busy and the crowd arrives in several bursts. Without turns all of them do."""


async def passed(wire: Wire) -> int:
    """Return how many tasks of the crowd come before that of the other tenant."""
    count = 0
    while (await wire.batcher.task()).tenant != "other":
        count += 1
    return count


async def test_many_calls_of_one_tenant_let_another_pass(wire: Wire) -> None:
    tenants = ["crowd"] * CROWD + ["other"]
    calls = [
        wire.stub.Generate(prompt(), metadata=(("sluice-tenant", tenant),)) for tenant in tenants
    ]
    assert await passed(wire) <= PASSED_MAX
    for call in calls:
        call.cancel()
