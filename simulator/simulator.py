"""Simulate the mesh in virtual time: arrivals, admission, the batcher's queue, workers, frames back.

The queue is `batcher.core.scheduler.Queue` and the engine's scheduler is
`model_workers.engine.scheduler.Scheduler`, the ones that run in production. Delays between
processes are constant. Nothing is random: all chance is in the trace.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.entry import Batch, QueueEntry
from batcher.core.scheduler.queue import Queue
from model_workers.channels import DELAYS
from model_workers.engine.protocol import STREAM_COALESCE_MAX_S, Sampling, SequenceSpec
from simulator.admission import BUSY_REPORT_S, CAPACITY_REPORT_S, REPORT_S, SimulatedAdmission
from simulator.cores import Action, Alarm, Cores, EventQueue, Sharing
from simulator.cost import StepCost
from simulator.engines import ENGINES, EngineKind, EngineLimits, StepProgress
from simulator.results import Ending, History, RequestOutcome
from simulator.trace import Arrival
from simulator.worker import SimulatedWorker
from sluice.settings.batching import Policy, coalesce_s
from sluice.wire.subjects import RANKS


@dataclass(frozen=True, slots=True)
class Links:
    """Delays between the processes, in seconds."""

    in_s: float = 0.002
    """From the caller into the queue."""
    send_s: float = 0.001
    """From batcher to worker, and back."""
    out_s: float = 0.002
    """From the worker to the caller."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Configuration of a simulation.

    Attributes:
        weights: tenants whose weight is not 1.
        sharing: work of all processes on cores that engines share with them; None: engines have their
            own, and the work of the others is in `links`.
        admission: whether the gateway refuses what would be late.
        never_refused: indexes in the trace of requests that it admits in any case.
        until_s: when to stop; None: when everything has ended.
    """

    policy: Policy
    cost: StepCost
    workers: int = 1
    limits: EngineLimits = field(default_factory=EngineLimits)
    engine: EngineKind = "continuous"
    links: Links = field(default_factory=Links)
    sharing: Sharing | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    admission: bool = False
    never_refused: frozenset[int] = frozenset()
    until_s: float | None = None


def simulate(trace: Sequence[Arrival], setup: Setup) -> History:
    """Simulate a trace, which is in order of time and not empty.

    Raises:
        SimulationError: a request is longer than a worker's cache.
    """
    return _Simulation(trace, setup).run()


class _Simulation:
    """One run."""

    def __init__(self, trace: Sequence[Arrival], setup: Setup) -> None:
        self._setup = setup
        self._events = EventQueue()
        self._queue = Queue(setup.policy, dict(setup.weights))
        self._admission = SimulatedAdmission(self._queue) if setup.admission else None
        self._cores = Cores(setup.sharing, self._events) if setup.sharing else None
        self._outcomes = [RequestOutcome(arrival) for arrival in trace]
        self._history = History(self._outcomes, setup.workers, setup.limits.slots)
        longest = max(arrival.prompt_tokens + arrival.answer_tokens for arrival in trace)
        self._workers = {
            name: SimulatedWorker(
                name,
                ENGINES[setup.engine](setup.cost, setup.limits, longest),
                self._history,
                setup.links.send_s,
                self._events,
                self._cores,
                self._admitted,
                self._progressed,
            )
            for name in (f"w{number}" for number in range(setup.workers))
        }
        self._open = len(self._outcomes)
        self._pumping = Alarm(self._events, self._pump)
        """The queue is asked once for everything that happens at one time."""
        self._reporting = Alarm(self._events, self._report_load)
        self._entries: dict[str, QueueEntry] = {}
        """Requests in the queue, which have a number, or in the worker of their batch."""

    def run(self) -> History:
        """Run until everything has ended, or until `Setup.until_s`."""
        events, until = self._events, self._setup.until_s
        self._expect(0)
        self._reporting.set(0.0)
        while self._open and (due := events.next_at()) is not None:
            if until is not None and due > until:
                break
            events.step()
        if until is not None:
            events.now = until
        for entry in self._entries.values():
            if entry.number:
                self._leave_queue(entry)
        for worker in self._workers.values():
            worker.account()
        self._history.seconds = events.now
        return self._history

    # Gateway.

    def _expect(self, number: int) -> None:
        if number < len(self._outcomes):
            at_s = self._outcomes[number].arrival.at_s
            self._events.at(at_s, partial(self._arrive, number))

    def _arrive(self, number: int) -> None:
        self._expect(number + 1)
        outcome, now = self._outcomes[number], self._events.now
        arrival, admission = outcome.arrival, self._admission
        if admission is not None:
            is_forced = number in self._setup.never_refused
            outlook = admission.admit(arrival, now, always=is_forced)
            if outlook is None:
                self._end(outcome, Ending.REFUSED, now)
                return
            outcome.expected_s = outlook.total_s if outlook.is_total else None
        publish = partial(self._publish, number)
        self._handle(lambda: self._events.after(self._setup.links.in_s, publish))
        if arrival.timeout_s is not None:
            self._events.at(arrival.at_s + arrival.timeout_s, partial(self._expire, number))

    def _handle(self, then: Action) -> None:
        """Do half of a request's work in all processes but the engine, then run `then`."""
        if self._cores is None:
            then()
        else:
            self._cores.work(self._cores.sharing.request_s / 2, then)

    def _report_load(self) -> None:
        """Report the load of the batcher, and schedule the next report."""
        if self._admission is not None:
            now, capacities = self._events.now, self._capacities()
            self._admission.report(now, capacities)
            self._reporting.set(now + (BUSY_REPORT_S if len(self._queue) else REPORT_S))

    def _capacities(self) -> list[Capacity]:
        return [worker.capacity() for worker in self._workers.values()]

    # Batcher.

    def _publish(self, number: int) -> None:
        outcome = self._outcomes[number]
        if outcome.ending is Ending.OPEN:  # it may have expired on its way
            self._add(_entry(str(number), outcome.arrival))

    def _add(self, entry: QueueEntry) -> None:
        self._entries[entry.request_id] = entry
        self._queue.add(entry, self._events.now)
        self._pumping.set(self._events.now)

    def _pump(self) -> None:
        now = self._events.now
        while True:
            capacities = self._capacities()
            decision = self._queue.next_batch(now, capacities)
            if decision.batch is None:
                break
            self._send(decision.batch)
        waits, was_full = self._queue.waits, self._queue.waits.speeds.is_full
        waits.watch(now, has_capacity=any(capacity.free_slots > 0 for capacity in capacities))
        if waits.speeds.is_full != was_full:
            self._reporting.set(now + CAPACITY_REPORT_S)
        if decision.wake_at is not None:
            self._pumping.set(decision.wake_at)

    def _send(self, batch: Batch[QueueEntry]) -> None:
        worker = self._workers[batch.worker]
        sequences = []
        for member in batch.entries:
            self._leave_queue(member)
            sequences.append(self._sequence(int(member.request_id)))
        self._history.batches += 1
        self._history.requests_sent += len(batch.entries)
        worker.send(sequences, [member.cache_tokens for member in batch.entries])

    def _sequence(self, number: int) -> SequenceSpec:
        arrival = self._outcomes[number].arrival
        return SequenceSpec(
            request_id=str(number),
            owner="",
            attempt=0,
            prompt=(number,) * arrival.prompt_tokens,  # no two share a prefix
            produced=(),
            sampling=Sampling(max_tokens=arrival.answer_tokens),
            rank=RANKS[arrival.priority_class],
            coalesce_s=_coalesce_s(arrival),
            batch=str(self._history.batches),
        )

    def _leave_queue(self, entry: QueueEntry) -> None:
        waited_s = self._events.now - entry.waiting_since
        self._outcomes[int(entry.request_id)].wait_s += waited_s

    def _expire(self, number: int) -> None:
        """Expire a request: it leaves the queue or its worker."""
        outcome, request_id = self._outcomes[number], str(number)
        if outcome.ending is not Ending.OPEN:
            return
        self._end(outcome, Ending.EXPIRED, self._events.now)
        entry = self._entries.get(request_id)
        if entry is not None and entry.number:
            self._leave_queue(entry)
            self._queue.cancel(self._entries.pop(request_id))
        elif entry is not None and entry.batch is not None:
            self._workers[entry.batch.worker].drop(request_id)
            self._finish(request_id, 0, whole=False)
        self._pumping.set(self._events.now)

    def _finish(
        self, request_id: str, tokens: int, *, whole: bool = True, decode_s: float = 0.0
    ) -> None:
        entry, now = self._entries.pop(request_id), self._events.now
        self._queue.finish(entry, tokens, now, whole=whole, decode_s=decode_s)

    def _end(self, outcome: RequestOutcome, ending: Ending, at: float) -> None:
        outcome.ending, outcome.ended_at = ending, at
        self._open -= 1

    # Workers.

    def _admitted(self, refused: Sequence[str]) -> None:
        # A refused request returns to the queue like one that a gateway sends again.
        for request_id in refused:
            if request_id in self._entries:
                self._finish(request_id, 0, whole=False)
                entry = _entry(request_id, self._outcomes[int(request_id)].arrival)
                entry.returned, entry.charged = True, entry.prompt_tokens
                self._add(entry)
        self._pumping.set(self._events.now)

    def _progressed(self, worker: SimulatedWorker, progress: StepProgress) -> None:
        now, links = self._events.now, self._setup.links
        self._history.cells += progress.cells
        self._history.filled += progress.filled
        for request_id in progress.first:
            outcome = self._outcomes[int(request_id)]
            # A coalesced first token leaves with the next message of its worker.
            gather_s = _coalesce_s(outcome.arrival)
            is_read = gather_s <= STREAM_COALESCE_MAX_S
            first_at = now if is_read else DELAYS.tokens_due_at(now, gather_s)
            outcome.first_at = first_at + links.out_s
        # A computed prompt is reported at once, and ends with it: more capacity may be free.
        ended: dict[float, list[str]] = {now: []} if progress.first else {}
        for request_id in progress.ended:
            outcome = self._outcomes[int(request_id)]
            sent_at = now if progress.first else now + DELAYS.end_s(_coalesce_s(outcome.arrival))
            ended.setdefault(sent_at, []).append(request_id)
            if outcome.ending is Ending.OPEN:
                self._end(outcome, Ending.FINISHED, sent_at + links.out_s)
                self._handle(lambda: None)
                if self._admission is not None:
                    self._admission.ended(outcome.arrival)
                outcome.first_at = min(outcome.first_at or math.inf, sent_at + links.out_s)
        for sent_at, names in ended.items():
            first = progress.first if sent_at == now else ()
            self._events.at(sent_at + links.send_s, partial(self._report, worker, first, names))

    def _report(self, worker: SimulatedWorker, first: Sequence[str], ended: Sequence[str]) -> None:
        """Report first tokens and ends to the batcher."""
        for request_id in first:
            if request_id in self._entries:
                self._queue.on_answered(self._entries[request_id], self._events.now)
        for request_id in ended:
            worker.forget(request_id)
            if request_id in self._entries:
                outcome, now = self._outcomes[int(request_id)], self._events.now
                first_at = now if outcome.first_at is None else outcome.first_at
                tokens, decode_s = outcome.arrival.answer_tokens, max(0.0, now - first_at)
                self._finish(request_id, tokens, decode_s=decode_s)
        self._pumping.set(self._events.now)


def _coalesce_s(arrival: Arrival) -> float:
    # Of interactive answers first tokens and ends count, which are never delayed.
    return coalesce_s(arrival.priority_class, 1)


def _entry(request_id: str, arrival: Arrival) -> QueueEntry:
    timeout_s = math.inf if arrival.timeout_s is None else arrival.timeout_s
    return QueueEntry(
        request_id=request_id,
        priority_class=arrival.priority_class,
        deadline=arrival.at_s + timeout_s,
        tenant=arrival.tenant,
        workload=arrival.workload,
        prompt_tokens=arrival.prompt_tokens,
        max_tokens=arrival.max_tokens,
    )
