"""What a gateway stores of the costs of its tenants."""

from gateway.routing.budget import Spending
from gateway.shared.usage import StoredCosts


async def test_periods_that_are_over_are_forgotten() -> None:
    nothing: object = None  # without new costs the bucket is not used
    stored = StoredCosts(Spending(), nothing, "one", {0: {"a": 1.0}})  # type: ignore[arg-type]
    await stored.write()
    assert stored.written == {}
