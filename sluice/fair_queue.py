"""Start-time fair queueing: who is next, so that each tenant gets its share by weight.

Every tenant is a `Flow` with a virtual time: the cost of what it was given, divided by its weight. The waiting flow
with the smallest virtual time is next. A flow that does not wait accumulates no credit: when it returns, it starts at
the virtual time of the flow that was served last, unless its own is later. The caller chooses the cost of an item (1
for a request, its tokens), may correct it later, and keeps the items: a subclass of `Flow` holds those of one tenant.

P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queueing", 1996. While two flows wait, what they are given differs, divided
by their weights, by at most the largest cost of an item of each.

The gateway queues requests that wait for capacity of a batcher, the batcher those that wait for a worker. `place` and
`charge` take O(log n) for n waiting flows, and move O(n) entries of a list.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Entry = tuple[float, float, int, "FlowT"]

IDLE_FLOWS_MIN: Final = 1024
"""Flows that may be kept although nothing of them waits; beyond it they are cleaned up, at a constant cost a flow."""


@dataclass(eq=False, slots=True)
class Flow:
    """A tenant in a fair queue.

    Attributes:
        weight: its share, relative to other flows; positive.
        virtual_time: cost of what it was given, divided by `weight`.
        key: orders flows of equal virtual time, unique among them; None: nothing of it waits for its turn.
    """

    weight: float
    virtual_time: float = 0.0
    key: tuple[float, int] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits. A subclass whose items may wait out of turn overrides this."""
        return self.key is not None


FlowT = TypeVar("FlowT", bound=Flow)


class FairQueue(Generic[FlowT]):
    """Flows in the order in which they are served.

    Attributes:
        virtual_time: of the flow that was served last in its turn.
        flows: by tenant. Those that neither wait nor are ahead of others are dropped from time to time.
    """

    def __init__(self, new_flow: Callable[[float], FlowT], weights: Mapping[str, float]) -> None:
        """Start empty.

        Args:
            new_flow: makes a flow from its weight.
            weights: of the tenants that differ from 1.
        """
        self.virtual_time = 0.0
        self.flows: dict[str, FlowT] = {}
        self._new_flow = new_flow
        self._weights = weights
        self._entries: list[Entry[FlowT]] = []
        self._clean_up_at = IDLE_FLOWS_MIN

    def __iter__(self) -> Iterator[FlowT]:
        """Yield the waiting flows, the next one first."""
        return (entry[-1] for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first(self) -> FlowT | None:
        """The flow that is next; None: nothing waits."""
        return self._entries[0][-1] if self._entries else None

    def flow(self, tenant: str) -> FlowT:
        """Return the flow of `tenant`, a new one where there is none."""
        flow = self.flows.get(tenant)
        if flow is None:
            if len(self.flows) >= self._clean_up_at:
                self._drop_idle()
            flow = self.flows[tenant] = self._new_flow(self._weights.get(tenant, 1.0))
        return flow

    def activate(self, flow: FlowT) -> None:
        """Take from a flow that begins to wait the credit of the time in which it did not."""
        flow.virtual_time = max(flow.virtual_time, self.virtual_time)

    def place(self, flow: FlowT, key: tuple[float, int] | None) -> None:
        """Put a flow where its virtual time and `key` belong; None: nothing of it waits any more."""
        if key == flow.key:
            return
        self._take_out(flow)
        flow.key = key
        if key is not None:
            insort(self._entries, (flow.virtual_time, *key, flow))

    def serve(self, flow: FlowT) -> None:
        """Move the virtual time on to that of a flow which is served in its turn, before it is charged."""
        self.virtual_time = max(self.virtual_time, flow.virtual_time)

    def charge(self, flow: FlowT, cost: float) -> None:
        """Add the cost of an item to a flow; a negative cost corrects an earlier one."""
        self._move(flow, flow.virtual_time + cost / flow.weight)

    def use_weights(self, weights: Mapping[str, float]) -> None:
        """Continue with other weights; each flow keeps the cost that it is ahead or behind."""
        self._weights = weights
        for tenant, flow in self.flows.items():
            weight = weights.get(tenant, 1.0)
            lead = (flow.virtual_time - self.virtual_time) * flow.weight / weight
            flow.weight = weight
            self._move(flow, self.virtual_time + lead)

    def _move(self, flow: FlowT, virtual_time: float) -> None:
        self._take_out(flow)
        flow.virtual_time = virtual_time
        if flow.key is not None:
            insort(self._entries, (virtual_time, *flow.key, flow))

    def _take_out(self, flow: FlowT) -> None:
        if flow.key is not None:
            # Keys are unique, so the comparison never reaches the flow.
            del self._entries[bisect_left(self._entries, (flow.virtual_time, *flow.key, flow))]

    def _drop_idle(self) -> None:
        """Drop the flows that would start where a new one does."""
        self.flows = {
            tenant: flow
            for tenant, flow in self.flows.items()
            if flow.is_waiting or flow.virtual_time > self.virtual_time
        }
        self._clean_up_at = 2 * len(self.flows) + IDLE_FLOWS_MIN
