"""Workers of a model: their reports, the requests sent to them, what they grant, and which may get more."""

import math
from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from itertools import chain
from typing import Final

from batcher.core.queued_request import QueuedRequest
from batcher.core.scheduler.capacity import Capacity, UsableCapacity
from sluice.internal.v1 import worker_pb2
from sluice.wire.subjects import RANKS

FAILURES_MAX: Final = 2
"""Consecutive failures after which a worker is probed with single requests."""
BREAK_S: Final = 0.5
"""Pause before the first probe, in seconds; it doubles with each further failure."""
BREAK_S_MAX: Final = 10.0
"""Longest pause before a probe, in seconds."""
_NOTHING: Final = (0,) * len(RANKS)
_ENDLESS: Final = (math.inf,) * len(RANKS)


class WorkerBreaker:
    """Circuit breaker of a worker: one that fails fast would look idle and attract everything.

    Attributes:
        open_until: no request is sent before; 0 while the breaker is closed.
    """

    def __init__(self) -> None:
        self.open_until = 0.0
        self._failures = 0

    def failed(self, now: float) -> None:
        """Record that the worker returned requests, or was lost with some."""
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            pause_s = min(BREAK_S * 2 ** (self._failures - FAILURES_MAX), BREAK_S_MAX)
            self.open_until = now + pause_s

    def succeeded(self) -> None:
        """Record that a request got tokens or a result."""
        self.open_until, self._failures = 0.0, 0

    def requests_max(self, now: float) -> float:
        """Return how many requests may be in the worker: any while closed, none in the pause, then one as a probe."""
        if not self.open_until:
            return math.inf
        return 1 if self.open_until <= now else 0


class ChannelBroken(Exception):
    """Raised if reports or frames are missing, or the worker restarted or closed the channel: reopen it."""


class WorkerState:
    """One worker from the first report on its channel to its loss.

    Attributes:
        worker_id: the name that the worker gives itself; empty before its first report.
        live: whether the engine serves the channel, so that batches may be sent.
        report: the last one; it has the granted totals.
        load: as last reported.
        counts: what it has counted since it started; None before it is reported.
        refuses: whether it refused a request for lack of capacity; nothing is sent until its next report.
        requests: in the worker or in flight to it, by id.
        sent_requests: how many were sent since the channel was opened.
        next_sequence: number that its next report must have.
        unacknowledged: batches that the worker's reports do not count yet, by id.
        announced_demand: waiting requests by class, as last announced to it. Cleared by each heartbeat
            while requests wait, so that it is announced again: a worker gives the capacity of a silent
            batcher to others.
    """

    def __init__(self) -> None:
        self.worker_id = ""
        self.live = self.refuses = False
        self.load = worker_pb2.WorkerLoad()
        self.counts: worker_pb2.WorkerCounts | None = None
        self.requests: dict[str, QueuedRequest] = {}
        self.announced_demand: Sequence[int] = _NOTHING
        self.report = worker_pb2.StepReport()
        self.next_sequence = 0
        self.sent_requests = self._sent_tokens = 0
        self.unacknowledged: dict[str, Sequence[QueuedRequest]] = {}

    @property
    def serves(self) -> bool:
        """Whether it can compute: it is live, and so is the server behind it, if there is one."""
        return self.live and not self.load.server_unreachable

    # Messages from the worker.

    def on_report(self, report: worker_pb2.StepReport) -> None:
        """Handle a report of the channel.

        Raises:
            ChannelBroken: an earlier report is missing, or the worker has restarted.
        """
        if report.sequence != self.next_sequence:
            raise ChannelBroken(f"response {report.sequence} instead of {self.next_sequence}")
        if report.worker != self.worker_id:
            if self.worker_id:
                raise ChannelBroken(f"worker {report.worker} instead of {self.worker_id}")
            self.worker_id = report.worker
        self.next_sequence += 1
        self.report, self.load = report, report.load
        self.live, self.refuses = report.ready, False
        if report.HasField("counts"):
            self.counts = report.counts
            if any(self.announced_demand):
                self.announced_demand = ()

    # Requests sent to it.

    def add_batch(self, batch_id: str, requests: Sequence[QueuedRequest]) -> None:
        """Record a batch that was sent."""
        self.unacknowledged[batch_id] = requests
        self.sent_requests += len(requests)
        for request in requests:
            self._sent_tokens += request.cache_tokens
            self.requests[request.request_id] = request

    # Capacity.

    @property
    def has_capacity(self) -> bool:
        """Whether the worker grants slots to every class beyond what was sent."""
        return self._granted()[0][-1] > self.sent_requests

    def capacity(self, name: str, requests_max: float = math.inf) -> Capacity:
        """Return what may be sent to the worker now.

        Args:
            name: the worker.
            requests_max: requests of this batcher that may be in it.
        """
        load, remaining = self.load, requests_max - len(self.requests)
        in_flight = chain.from_iterable(self.unacknowledged.values())
        prefill = sum([request.prefill_tokens for request in in_flight])
        # Reading a message field takes a microsecond, and most often nothing waits.
        by_rank = (
            [rank.waiting_tokens for rank in load.classes] if load.waiting_tokens else _NOTHING
        )
        waiting, classes = prefill, list[UsableCapacity]()
        for slots, tokens, more in zip(*self._granted(), by_rank or _NOTHING, strict=False):
            waiting += more
            free_slots = min(slots - self.sent_requests, remaining)
            classes.append(UsableCapacity(free_slots, tokens - self._sent_tokens, waiting))
        return Capacity(
            worker=name,
            free_slots=classes[-1].free_slots,
            free_tokens=classes[-1].free_tokens,
            waiting_tokens=load.waiting_tokens + prefill,
            running=load.running + load.waiting,
            batches_in_flight=len(self.unacknowledged),
            batches_running=load.batches + len(self.unacknowledged),
            urgent=classes[:-1] if load.classes else (),
        )

    def _granted(self) -> tuple[Sequence[int], Sequence[float]]:
        """Return the granted totals of slots and KV cache tokens, by class."""
        requests, tokens = self.report.task_grants, self.report.token_grants
        # A grant that does not tell the classes apart is none.
        granted = len(requests) == len(RANKS) and not self.refuses
        return requests if granted else _NOTHING, tokens if len(tokens) == len(RANKS) else _ENDLESS


def without_standby(live: Collection[str], ranked: Sequence[str], standby: int) -> list[str]:
    """Return the live workers that get requests.

    The last `standby` ones of `ranked`, which lists all workers of the model, only replace lost
    ones. All batchers rank alike, so they leave out the same ones.
    """
    return [worker for worker in ranked if worker in live][: len(ranked) - standby]


class WorkerTable:
    """All workers of a model by name, and which of them get requests.

    Attributes:
        states: the workers whose channel has reported; created by the first report, removed at the loss.
        drained: workers that get no new requests.
    """

    def __init__(self, ranked: Sequence[str] = (), standby: int = 0) -> None:
        """Create an empty table; `ranked` lists all workers, preferred ones first (see `without_standby`)."""
        self._ranked, self._standby = ranked, standby
        self.states = defaultdict[str, WorkerState](WorkerState)
        self._breakers = defaultdict[str, WorkerBreaker](WorkerBreaker)
        self.drained: frozenset[str] = frozenset()

    def left_worker(self, request: QueuedRequest) -> WorkerState | None:
        """Remove a request from its worker; return the worker unless it is lost."""
        worker = self.states.get(request.worker)
        if worker is not None:
            worker.requests.pop(request.request_id, None)
        return worker

    def record_outcome(self, worker: str, now: float, *, succeeded: bool, failed: bool) -> None:
        """Tell the worker's breaker that requests got tokens, or were lost or returned."""
        if succeeded:
            self._breakers[worker].succeeded()
        if failed:
            self._breakers[worker].failed(now)

    def is_failing(self, worker: str) -> bool:
        """Return whether the breaker of a worker is open, or probes it."""
        return self._breakers[worker].open_until > 0

    # Which of them get requests.

    def active(self) -> dict[str, WorkerState]:
        """Return the workers to which batches may be sent."""
        live = {
            name: state
            for name, state in self.states.items()
            if state.live and name not in self.drained
        }
        # While no server behind any worker answers, requests go to a worker, which fails them at once.
        live = {name: state for name, state in live.items() if state.serves} or live
        if not self._standby:
            return live
        # A failing worker is replaced by a standby too, and probed beside it.
        failing = {name for name in live if self.is_failing(name)}
        chosen = without_standby(live.keys() - failing, self._ranked, self._standby)
        return {name: live[name] for name in live if name in failing or name in chosen}

    def capacities(self, active: Mapping[str, WorkerState], now: float) -> list[Capacity]:
        """Return what may be sent to each of the active workers."""
        return [
            state.capacity(name, self._breakers[name].requests_max(now))
            for name, state in active.items()
        ]

    def probe_at(self, now: float) -> float:
        """Return when the next failing worker is probed."""
        pauses = [breaker.open_until for breaker in self._breakers.values()]
        return min([until for until in pauses if until > now], default=math.inf)

    def demand_changes(
        self, waiting: Sequence[int], active: Container[str], informed: Container[str], now: float
    ) -> list[tuple[str, Sequence[int]]]:
        """Record and return what to announce: a worker, and how many requests of each class wait.

        A worker is told when a class begins or ceases to wait, and after each of its heartbeats while one does. The
        batch that was just sent has told the workers in `informed`; a failing one among them gets zeros beside it.
        """
        demands: list[tuple[str, Sequence[int]]] = []
        for name, state in self.states.items():
            if name in informed:
                state.announced_demand = waiting
            wants = any(waiting) and name in active
            # A worker behind an open breaker gets no more requests for now, so nothing waits for it.
            may_send = self._breakers[name].requests_max(now) > len(state.requests)
            demand = waiting if wants and may_send else _NOTHING
            if state.live and list(map(bool, demand)) != list(map(bool, state.announced_demand)):
                state.announced_demand = demand
                demands.append((name, demand))
        return demands
