"""Fairness of `FairQueue` for any costs, weights and arrivals."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sluice.fair_queue import IDLE_FLOWS_MIN, FairQueue, Flow

WEIGHTS = {"b": 2.0, "c": 0.5}
COSTS = st.floats(0.1, 100.0)


class Tenants:
    """Flows whose items are costs; `given` is the cost of what each tenant was served."""

    def __init__(self) -> None:
        self.queue = FairQueue[Flow](Flow, WEIGHTS)
        self.items: dict[str, list[float]] = {}
        self.given = Counter[str]()
        self._number = 0

    def add(self, tenant: str, *costs: float) -> None:
        self.items.setdefault(tenant, []).extend(costs)
        flow = self.queue.flow(tenant)
        if flow.key is None:
            self._number += 1
            self.queue.activate(flow)
            self.queue.place(flow, (0.0, self._number))

    def serve(self) -> str:
        """Serves the next item, and returns whose it was."""
        flow = self.queue.first
        assert flow is not None
        (tenant,) = (name for name, other in self.queue.flows.items() if other is flow)
        cost = self.items[tenant].pop(0)
        self.queue.serve(flow)
        self.queue.charge(flow, cost)
        self.given[tenant] += cost  # type: ignore[assignment]
        if not self.items[tenant]:
            self.queue.place(flow, None)
        return tenant


@given(st.lists(COSTS, min_size=20, max_size=40), st.lists(COSTS, min_size=20, max_size=40))
def test_waiting_flows_differ_by_two_items(ones: list[float], others: list[float]) -> None:
    tenants = Tenants()
    tenants.add("a", *ones)
    tenants.add("b", *others)
    while all(tenants.items.values()):
        tenants.serve()
        lead = abs(tenants.given["a"] / 1.0 - tenants.given["b"] / WEIGHTS["b"])
        assert lead <= max(ones) + max(others) / WEIGHTS["b"] + 1e-9


@given(st.lists(st.tuples(st.sampled_from("abc"), COSTS), min_size=1, max_size=60))
def test_order_is_that_of_virtual_times(arrivals: Sequence[tuple[str, float]]) -> None:
    tenants = Tenants()
    for tenant, cost in arrivals:
        tenants.add(tenant, cost)
        order = [(flow.virtual_time, flow.key) for flow in tenants.queue]
        assert order == sorted(order)  # type: ignore[type-var]
    for _ in arrivals:
        least = min(flow.virtual_time for flow in tenants.queue)
        served = tenants.queue.flow(tenants.serve())
        assert served.virtual_time > least == tenants.queue.virtual_time
    assert len(tenants.queue) == 0
    assert tenants.queue.first is None


@given(st.integers(1, 50), COSTS)
def test_an_idle_flow_accumulates_no_credit(served: int, cost: float) -> None:
    tenants = Tenants()
    tenants.add("late", cost)
    tenants.serve()
    tenants.add("busy", *[cost] * (served + 4))
    for _ in range(served):
        tenants.serve()
    tenants.add("late", *[cost] * 4)
    assert Counter(tenants.serve() for _ in range(4)) == {"late": 2, "busy": 2}


@given(COSTS, COSTS)
def test_a_corrected_cost_is_as_if_it_was_known(estimate: float, cost: float) -> None:
    corrected, known = Tenants(), Tenants()
    for tenants, first in ((corrected, estimate), (known, cost)):
        tenants.add("a", first, 1.0, 1.0)
        tenants.add("b", 1.0, 1.0)
        assert tenants.serve() == "a"
    corrected.queue.charge(corrected.queue.flow("a"), cost - estimate)
    flows = (tenants.queue.flow("a").virtual_time for tenants in (corrected, known))
    assert abs(next(flows) - next(flows)) < 1e-9


@given(st.floats(0.1, 10.0), st.lists(COSTS, min_size=1, max_size=9))
def test_new_weights_keep_the_cost_of_a_lead(weight: float, costs: list[float]) -> None:
    tenants = Tenants()
    tenants.add("a", *costs, 1.0)
    tenants.add("c", 1.0)
    queue, flow = tenants.queue, tenants.queue.flow("a")
    for cost in costs:
        queue.charge(flow, cost)
    lead = (flow.virtual_time - queue.virtual_time) * flow.weight
    queue.use_weights({"a": weight})
    assert flow.weight == weight
    assert abs((flow.virtual_time - queue.virtual_time) * weight - lead) < 1e-6
    assert [flow.virtual_time for flow in queue] == sorted(flow.virtual_time for flow in queue)


def test_flows_that_are_idle_and_not_ahead_are_dropped() -> None:
    tenants = Tenants()
    tenants.add("waits", 1.0)
    ahead = tenants.queue.flow("ahead")
    tenants.queue.charge(ahead, 5.0)
    for number in range(IDLE_FLOWS_MIN):
        tenants.queue.flow(f"idle {number}")
    assert {"waits", "ahead"} <= tenants.queue.flows.keys()
    assert len(tenants.queue.flows) < 10
