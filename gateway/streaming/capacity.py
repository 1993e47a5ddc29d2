"""The capacity that batchers grant this gateway, and the runs that wait for it.

A batcher says in its reports how many runs of a class, and how many bytes of their tasks, one gateway may have there
without a frame. The gateway counts its own runs, so a report that is lost, doubled or late neither makes nor loses
capacity. Interactive runs use none, and never wait. Inside a class tenants share by weight, and one that comes late
gets its share on top of what others use.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from gateway.streaming.model_run import ModelRun, RunClass
from sluice.fair_queue import FairQueue, Flow


class BatcherCapacity(NamedTuple):
    """Runs of one class, and bytes of their tasks, that a gateway may have at one batcher."""

    runs: float
    task_bytes: float


class UsedCapacity:
    """How much of each batcher's capacity this gateway's runs use."""

    def __init__(self) -> None:
        self._weights: Mapping[str, float] = {}
        self._runs: defaultdict[tuple[str, RunClass], Counter[str]] = defaultdict(Counter)
        """By batcher and class: runs of each tenant."""
        self._bytes: defaultdict[tuple[str, RunClass], Counter[str]] = defaultdict(Counter)

    def use_weights(self, weights: Mapping[str, float]) -> None:
        """Share by the `weights` of tenants that differ from 1."""
        self._weights = weights

    def take(self, run: ModelRun, batcher: str) -> None:
        """Count a run that is sent to a batcher; urgent ones are not."""
        self.free(run)
        run.capacity_at = batcher
        self._runs[batcher, run.run_class][run.task.tenant] += 1
        self._bytes[batcher, run.run_class][run.task.tenant] += run.task_bytes

    def free(self, run: ModelRun) -> bool:
        """Count a run no more; return whether it was counted."""
        if not run.capacity_at:
            return False
        key, tenant = (run.capacity_at, run.run_class), run.task.tenant
        run.capacity_at = ""
        runs, sizes = self._runs[key], self._bytes[key]
        runs[tenant] -= 1
        sizes[tenant] -= run.task_bytes
        if not runs[tenant]:
            del runs[tenant], sizes[tenant]
        if not runs:
            del self._runs[key], self._bytes[key]
        return True

    def fits(self, run: ModelRun, batcher: str, capacity: BatcherCapacity) -> bool:
        """Return whether a batcher has capacity for the run, or its tenant's share has; a first run always fits."""
        key, tenant = (batcher, run.run_class), run.task.tenant
        if key not in self._runs:
            return True
        runs, sizes = self._runs[key], self._bytes[key]
        if runs.total() < capacity.runs and sizes.total() + run.task_bytes <= capacity.task_bytes:
            return True
        share = self._weight(tenant) / sum(map(self._weight, {*runs, tenant}))
        has_few = runs[tenant] + 1 <= share * capacity.runs
        return has_few and sizes[tenant] + run.task_bytes <= share * capacity.task_bytes

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


@dataclass(eq=False, slots=True)
class _TenantRuns(Flow):
    """A tenant in a wait queue.

    Attributes:
        runs: in order.
        sent_before: how many at the head of `runs` a batcher had before.
    """

    runs: deque[ModelRun] = field(default_factory=deque)
    sent_before: int = 0


class WaitQueue:
    """Runs of one class that wait for capacity; tenants share it, each run costs its tenant the same.

    Runs that a batcher had before go before others of their tenant, both in the order in which they came.

    Attributes:
        may_have_capacity: whether some of them may be sent.
        no_batcher_since: since when there is no batcher for them, monotonic seconds; infinity: there is one.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Start empty, with the `weights` of tenants that differ from 1."""
        self.may_have_capacity = False
        self.no_batcher_since = inf
        self._tenants = FairQueue[_TenantRuns](_TenantRuns, weights)
        self._arrivals = 0
        """How often a tenant has begun to wait."""

    def __len__(self) -> int:
        return sum(len(tenant.runs) for tenant in list(self._tenants))

    @property
    def oldest_at(self) -> float:
        """Earliest `queued_at` of the tenants' first runs, monotonic seconds; infinity: none waits."""
        heads = [tenant.runs[0] for tenant in list(self._tenants) if tenant.runs]
        return min((run.queued_at for run in heads), default=inf)

    def use_weights(self, weights: Mapping[str, float]) -> None:
        """Share by other weights from now on."""
        self._tenants.use_weights(weights)

    def add(self, run: ModelRun) -> None:
        """Let a run wait."""
        tenant = self._tenants.flow(run.task.tenant)
        tenant.runs.insert(tenant.sent_before if run.attempt_number else len(tenant.runs), run)
        tenant.sent_before += run.attempt_number > 0
        if tenant.key is None:
            self._arrivals += 1
            self._tenants.activate(tenant)
            self._tenants.place(tenant, (0.0, self._arrivals))

    def remove(self, run: ModelRun) -> None:
        """Let a run wait no more."""
        tenant = self._tenants.flow(run.task.tenant)
        tenant.runs.remove(run)
        tenant.sent_before -= run.attempt_number > 0
        if not tenant.runs:
            self._tenants.place(tenant, None)

    def has(self, tenant: str) -> bool:
        """Return whether runs of a tenant wait."""
        flow = self._tenants.flows.get(tenant)
        return flow is not None and bool(flow.runs)

    def heads(self) -> list[ModelRun]:
        """Return the first run of each tenant, in fair order."""
        return [tenant.runs[0] for tenant in self._tenants]

    def serve(self, run: ModelRun) -> None:
        """Remove a run that is sent in its turn, and charge its tenant."""
        tenant = self._tenants.flow(run.task.tenant)
        self._tenants.serve(tenant)
        self._tenants.charge(tenant, 1.0)
        self.remove(run)
