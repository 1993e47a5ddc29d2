"""What is known of every model: its load, as batchers report it, and whether it fails.

A batcher reports how long a new task of each class would wait, how many would not wait at all, and how fast workers
are. Reports name models as tasks do; breakers know them by their names in the catalogue. A model that fails repeatedly
gets no requests for a while, then probes (circuit breaker: Nygard, Release It!).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Final

from gateway.streaming.capacity import BatcherCapacity
from gateway.streaming.model_run import RunClass
from sluice.internal.v1.control_pb2 import BatcherReport, ClassReport, ModelReport
from sluice.settings.routing import BreakerRules

UNLIMITED: Final = BatcherCapacity(math.inf, math.inf)
"""Capacity where a batcher's report sets no limit for the class: urgent tasks need none."""
EXPIRY_S: Final = 3.5
"""Age from which on a report is not used any more, in seconds: batchers report every second."""
PROBE_S: Final = 30.0
"""How long a probe may take, in seconds; then it counts as lost and the next one may go."""


@dataclass(frozen=True)
class ClassLoad:
    """The load of one class of one model over all batchers.

    Attributes:
        task_tokens: Mean length of their prompts and expected answers; 0 if unknown.
        wait_s: Expected wait for a worker of a task that arrives with the report, of a tenant that has none queued.
        tenant_waits_s: The same for tenants that have many queued.
        free_tasks: Tasks of the class that would not wait.
        first_token_s: Time in a worker until the first token, without the prompt; 0 if unknown.
        prompt_token_s: Time for each token of the prompt.
        token_s: Time for each further token of the answer.
    """

    task_tokens: float = 0.0
    wait_s: float = 0.0
    tenant_waits_s: Mapping[str, float] = field(default_factory=dict)
    free_tasks: int = 0
    first_token_s: float = 0.0
    prompt_token_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True)
class ModelLoad:
    """The load of one model over all batchers.

    Attributes:
        workers: Live workers.
        slots: Their slots.
        running: Sequences that run in them.
        queued: Tasks that wait for them.
        tokens_per_s: Rate of the workers while all their capacity is used, prompts and answers; 0 if it is not, or
            unknown.
        reported_at: When the oldest of the reports arrived, in monotonic seconds.
        classes: Loads by class; of one that is not reported an idle one.
    """

    workers: int = 0
    slots: int = 0
    running: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    reported_at: float = 0.0
    classes: Mapping[str, ClassLoad] = field(default_factory=lambda: defaultdict(ClassLoad))

    @property
    def ready(self) -> bool:
        """Whether a worker is alive."""
        return self.workers > 0


@dataclass
class _Batcher:
    """The last report of one batcher.

    Attributes:
        reported_at: When it arrived.
        sequence: Its number.
        models: What it says of each model.
        sent: Tasks that this gateway has sent to the batcher since, by model.
        choice: The number of the last choice that fell on it.
    """

    reported_at: float
    sequence: int
    models: Mapping[str, ModelReport]
    sent: Counter[str] = field(default_factory=Counter)
    choice: int = 0


class ModelLoadTable:
    """The last report of every batcher."""

    def __init__(self) -> None:
        self._batchers: dict[str, _Batcher] = {}
        self._choices = 0
        self._loads: dict[str, ModelLoad] = {}
        """Sums over the batchers, computed since their reports changed."""

    def update(self, report: BatcherReport, now: float) -> None:
        """Replace the previous report of the batcher, unless that is newer; remove a batcher that leaves."""
        previous = self._batchers.get(report.batcher)
        if previous is not None and report.sequence < previous.sequence:
            return
        self._loads.clear()
        self._batchers.pop(report.batcher, None)
        if not report.leaving:
            models = {entry.model: entry for entry in report.models}
            choice = 0 if previous is None else previous.choice
            self._batchers[report.batcher] = _Batcher(now, report.sequence, models, choice=choice)

    def expire(self, now: float) -> None:
        """Remove batchers that have been silent for `EXPIRY_S`."""
        live = {
            name: batcher
            for name, batcher in self._batchers.items()
            if batcher.reported_at + EXPIRY_S > now
        }
        if len(live) < len(self._batchers):
            self._batchers = live
            self._loads.clear()

    def choose(self, model: str, without: Collection[str], now: float) -> str | None:
        """Return the batcher for the next task of `model`, and count the task there.

        It has a worker, and the fewest tasks wait there; among equals it is the one that was chosen longest ago. None
        if there is none but `without`.
        """
        candidates = [
            (entry.queued + batcher.sent[model], batcher.choice, name)
            for name, batcher, entry in self._serving(model, now)
            if name not in without
        ]
        if not candidates:
            return None
        *_, name = min(candidates)
        self._choices += 1
        self._batchers[name].sent[model] += 1
        self._batchers[name].choice = self._choices
        return name

    def capacities(self, run_class: RunClass, now: float) -> dict[str, BatcherCapacity]:
        """Return what each batcher with a worker of the model grants this gateway for runs of the class."""
        capacities = dict[str, BatcherCapacity]()
        for name, _, entry in self._serving(run_class.model, now):
            capacities[name] = UNLIMITED
            for report in entry.classes:
                if report.priority_class == run_class.priority_class and report.HasField(
                    "room_rows"
                ):
                    capacities[name] = BatcherCapacity(report.room_rows, report.room_bytes)
        return capacities

    def _serving(self, model: str, now: float) -> Iterator[tuple[str, _Batcher, ModelReport]]:
        """Yield the batchers that have a worker of `model`."""
        for name, batcher in self._batchers.items():
            entry = batcher.models.get(model)
            if entry is not None and entry.workers and batcher.reported_at + EXPIRY_S > now:
                yield name, batcher, entry

    def load(self, model: str, now: float) -> ModelLoad:
        """Return the load of `model`."""
        load = self._loads.get(model)
        if load is None or load.reported_at + EXPIRY_S <= now:
            self.expire(now)
            load = self._loads[model] = self._sum(model)
        return load

    def _sum(self, model: str) -> ModelLoad:
        """Return the load over all batchers. They share the workers: only queues and speeds add up."""
        batchers = [batcher for batcher in self._batchers.values() if model in batcher.models]
        if not batchers:
            return ModelLoad()
        reports = [batcher.models[model] for batcher in batchers]
        reported = defaultdict[str, list[ClassReport]](list)
        for entry in chain.from_iterable(report.classes for report in reports):
            reported[entry.priority_class].append(entry)
        classes = {name: _class_load(entries) for name, entries in reported.items()}
        return ModelLoad(
            workers=max(report.workers for report in reports),
            slots=max(report.slots for report in reports),
            running=max(report.running for report in reports),
            queued=sum(report.queued for report in reports),
            tokens_per_s=sum(report.tokens_per_s for report in reports),
            reported_at=min(batcher.reported_at for batcher in batchers),
            classes=defaultdict(ClassLoad, classes),
        )


def _class_load(entries: Sequence[ClassReport]) -> ClassLoad:
    queued = sum(entry.queued for entry in entries)
    # A batcher that knows no speed has measured none: it has had few tasks.
    measured = [entry for entry in entries if entry.first_token_ms + entry.prompt_token_ms > 0]

    def mean_s(values_ms: Iterable[float]) -> float:
        return fmean(values_ms) / 1e3 if measured else 0.0

    def wait_s(tenant: str) -> float:
        """Return the mean wait: a task may go to any of the batchers."""
        waits_ms = (entry.tenant_wait_ms.get(tenant, entry.expected_wait_ms) for entry in entries)
        return fmean(waits_ms) / 1e3

    return ClassLoad(
        task_tokens=sum(entry.queued_tokens for entry in entries) / queued if queued else 0.0,
        wait_s=fmean(entry.expected_wait_ms for entry in entries) / 1e3,
        tenant_waits_s={name: wait_s(name) for entry in entries for name in entry.tenant_wait_ms},
        free_tasks=sum(entry.free_rows for entry in entries),
        first_token_s=mean_s(entry.first_token_ms for entry in measured),
        prompt_token_s=mean_s(entry.prompt_token_ms for entry in measured),
        token_s=mean_s(entry.token_ms for entry in measured),
    )


@dataclass
class _Breaker:
    """The breaker of one model: closed, open until a time, or half-open while one request at a time probes it."""

    failures: int = 0
    """Failures in a row while it is closed."""
    closed: bool = True
    half_open: bool = False
    next_at: float = -math.inf
    """Earliest time of the next request; a closed breaker lets all pass."""


class Breakers:
    """One breaker per model. Every request that was `sent` ends with `succeeded`, `failed` or `abandoned`."""

    def __init__(self) -> None:
        self._breakers: defaultdict[str, _Breaker] = defaultdict(_Breaker)

    def retry_after_s(self, model: str, now: float) -> float:
        """Return the seconds until a request may go to the model; 0 means now."""
        return max(0.0, self._breakers[model].next_at - now)

    def sent(self, model: str, now: float) -> None:
        """Note a request to the model; it is a probe unless the breaker is closed."""
        breaker = self._breakers[model]
        if not breaker.closed:
            breaker.half_open, breaker.next_at = True, now + PROBE_S

    def succeeded(self, model: str) -> None:
        """Note an answer. It closes a half-open breaker; an open one stays open."""
        breaker = self._breakers[model]
        breaker.failures = 0
        if breaker.half_open:
            self._breakers[model] = _Breaker()

    def failed(self, model: str, rules: BreakerRules, now: float) -> None:
        """Note a failure that the model itself caused."""
        breaker = self._breakers[model]
        breaker.failures += 1
        if breaker.half_open or (breaker.closed and breaker.failures >= rules.failures):
            until = now + rules.open_s
            self._breakers[model] = _Breaker(closed=False, next_at=until)

    def abandoned(self, model: str) -> None:
        """Note a request without a result for or against the model, so that another probe may go."""
        breaker = self._breakers[model]
        if breaker.half_open:
            breaker.next_at = -math.inf
