"""The load of every model as batchers report it, and overload control by expected wait.

A request that would miss its deadline is degraded to a smaller model or refused.

A batcher reports how long a new task of each class would wait, and how long answers take. Between two reports the
estimate grows by the tasks that this gateway has sent since, and shrinks as time passes. While no task waits, no
request is refused: without answers a wrong estimate would never be corrected.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Final

from gateway.routing.breaker import Breakers
from gateway.routing.plan import Plan
from gateway.streaming.room import Line, Room
from sluice.errors import ModelUnavailable, Overloaded, SluiceError
from sluice.internal.v1.control_pb2 import BatcherReport, ClassReport, ModelReport
from sluice.settings.models import ModelSettings
from sluice.settings.routing import BreakerSettings
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_SAFETY
from sluice.wire.subjects import CLASSES, RANKS

MARGIN: Final = 0.2
"""Share of the time to the deadline that is kept in reserve for errors of the estimates. Without it half of the
requests that are just admitted would be late, each instead of one in time."""

UNBOUNDED: Final = Room(math.inf, math.inf)
"""The room of a batcher of an older release, which does not say it."""
EXPIRY_S: Final = 3.5
"""A report older than this is not used any more."""

RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 60.0
UNAVAILABLE_RETRY_S: Final = 1.0


@dataclass(frozen=True)
class ClassLoad:
    """The load of one class of one model over all batchers."""

    task_tokens: float = 0.0
    """Mean length of their prompts and expected answers; 0: not known."""
    wait_s: float = 0.0
    """Expected wait for a worker of a task that arrives with the report, of a tenant that has none waiting."""
    tenant_waits_s: Mapping[str, float] = field(default_factory=dict)
    """The same of tenants that have many."""
    service_s: float = 0.0
    """How long a worker takes for an answer; 0: not known."""


_NOTHING: Final = ClassLoad()


@dataclass(frozen=True)
class ModelLoad:
    """The load of one model over all batchers."""

    workers: int = 0
    slots: int = 0
    running: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    """Throughput of the workers in tokens of waiting tasks; 0: not known."""
    reported_at: float = 0.0
    """When the oldest of the reports arrived."""
    classes: Mapping[str, ClassLoad] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether a worker is alive."""
        return self.workers > 0

    def of_class(self, priority_class: str) -> ClassLoad:
        """The load of one class; nothing waits in a class that is not reported."""
        return self.classes.get(priority_class, _NOTHING)


@dataclass
class _Batcher:
    """The last report of one batcher."""

    reported_at: float
    sequence: int
    models: Mapping[str, ModelReport]
    sent: Counter[str] = field(default_factory=Counter)
    """Tasks that this gateway has sent to it since, by model."""
    chosen: int = 0
    """The number of the last choice that it was."""


class ModelLoadTable:
    """The last report of every batcher. Models are called as in tasks."""

    def __init__(self) -> None:
        self._batchers: dict[str, _Batcher] = {}
        self._choices = 0
        self._loads: dict[str, ModelLoad] = {}
        """Computed since the reports changed; every request asks for several."""

    def update(self, report: BatcherReport, now: float) -> None:
        """Replaces the previous report of the batcher, unless that is newer."""
        known = self._batchers.get(report.batcher)
        if known is not None and report.sequence < known.sequence:
            return
        self._loads.clear()
        self._batchers.pop(report.batcher, None)
        if not report.leaving:
            models = {entry.model: entry for entry in report.models}
            chosen = 0 if known is None else known.chosen
            self._batchers[report.batcher] = _Batcher(now, report.sequence, models, chosen=chosen)

    def expire(self, now: float) -> None:
        """Removes batchers that have been silent for `EXPIRY_S`."""
        live = {
            name: one for name, one in self._batchers.items() if one.reported_at + EXPIRY_S > now
        }
        if len(live) < len(self._batchers):
            self._batchers = live
            self._loads.clear()

    def choose(self, model: str, without: Collection[str], now: float) -> str | None:
        """The batcher for the next task of ``model``: with a worker, where the fewest tasks wait.

        Among equals it is the one that was chosen longest ago. None: there is none but ``without``.
        """
        found = [
            (entry.queued + batcher.sent[model], batcher.chosen, name)
            for name, batcher, entry in self._serving(model, now)
            if name not in without
        ]
        if not found:
            return None
        *_, name = min(found)
        self._choices += 1
        self._batchers[name].sent[model] += 1
        self._batchers[name].chosen = self._choices
        return name

    def rooms(self, line: Line, now: float) -> dict[str, Room]:
        """What each batcher with a worker of the model grants this gateway for rows of the class."""
        found = dict[str, Room]()
        for name, _, entry in self._serving(line.model, now):
            found[name] = UNBOUNDED
            for one in entry.classes:
                if one.priority_class == line.priority_class and one.HasField("room_rows"):
                    found[name] = Room(one.room_rows, one.room_bytes)
        return found

    def _serving(self, model: str, now: float) -> Iterator[tuple[str, _Batcher, ModelReport]]:
        """The batchers that have a worker of ``model``."""
        for name, batcher in self._batchers.items():
            entry = batcher.models.get(model)
            if entry is not None and entry.workers and batcher.reported_at + EXPIRY_S > now:
                yield name, batcher, entry

    def load(self, model: str, now: float) -> ModelLoad:
        """The load of ``model``. Batchers share the workers: only their queues and their speeds add up."""
        load = self._loads.get(model)
        if load is None or load.reported_at + EXPIRY_S <= now:
            self.expire(now)
            load = self._loads[model] = self._sum(model)
        return load

    def _sum(self, model: str) -> ModelLoad:
        found = [one for one in self._batchers.values() if model in one.models]
        if not found:
            return ModelLoad()
        reports = [one.models[model] for one in found]
        classes = defaultdict[str, list[ClassReport]](list)
        for entry in chain.from_iterable(one.classes for one in reports):
            classes[entry.priority_class].append(entry)
        return ModelLoad(
            workers=max(one.workers for one in reports),
            slots=max(one.slots for one in reports),
            running=max(one.running for one in reports),
            queued=sum(one.queued for one in reports),
            tokens_per_s=sum(one.tokens_per_s for one in reports),
            reported_at=min(one.reported_at for one in found),
            classes={name: _class_load(entries) for name, entries in classes.items()},
        )


@dataclass(frozen=True)
class OverloadRules:
    """The part of the policies by which a model is refused, or replaced by a smaller one.

    Attributes:
        fallbacks: smaller models by model, in the order in which they are tried.
        models: by name, for their tiers, and for what tasks call them; others are called by their names.
    """

    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    models: Mapping[str, ModelSettings] = field(default_factory=dict)


NO_RULES: Final = OverloadRules()


@dataclass(eq=False)
class SchedulingParams:
    """Class, deadline and degradation of a request, for the estimate of its wait."""

    priority_class: str
    deadline: float
    """Monotonic seconds."""
    allow_degraded: bool = False
    tenant: str = ""
    """Whose request it is: one that floods a model does not make those of others hopeless."""
    arrived_at: float = 0.0
    """Monotonic seconds."""
    rules: OverloadRules = NO_RULES

    def task_of(self, model: str) -> str:
        """What tasks call ``model``."""
        known = self.rules.models.get(model)
        return model if known is None else known.task_name


class _Sent:
    """Tasks that this gateway has sent to a model since the batchers' reports."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[float, int, float]] = deque()
        self._tokens = [0.0] * len(CLASSES)
        """By the rank of the class."""

    def add(self, priority_class: str, tokens: float, now: float, since: float) -> None:
        self._forget(since)  # here too: where a model has no rate, nobody asks for the tokens
        rank = RANKS[priority_class]
        self._tasks.append((now, rank, tokens))
        self._tokens[rank] += tokens

    def tokens_ahead(self, priority_class: str, since: float) -> float:
        """Of this class and the more urgent ones, sent after ``since``."""
        self._forget(since)
        return sum(self._tokens[: RANKS[priority_class] + 1])

    def _forget(self, since: float) -> None:
        while self._tasks and self._tasks[0][0] <= since:
            _, rank, tokens = self._tasks.popleft()
            self._tokens[rank] -= tokens


class OverloadControl:
    """Decides whether a model can still answer in time.

    Args:
        breakers: circuit breakers of the models.

    Attributes:
        loads: of the models.
    """

    def __init__(self, loads: ModelLoadTable, breakers: Breakers) -> None:
        self.loads = loads
        self._breakers = breakers
        self._sent: defaultdict[str, _Sent] = defaultdict(_Sent)
        """By what tasks call the model."""

    def refuse_hopeless(
        self, models: Sequence[str], scheduling: SchedulingParams, now: float
    ) -> None:
        """Refuses a request early when none of ``models``, all that may answer it, could do so in time.

        Raises:
            ModelUnavailable, Overloaded: as `check`.
        """
        candidates = list(models)
        if scheduling.allow_degraded:
            fallbacks = scheduling.rules.fallbacks
            candidates += [name for model in models for name in fallbacks.get(model, ())]
        problems = []
        for model in candidates:
            problem = self.problem(model, scheduling, now)
            if problem is None:
                return
            problems.append(problem)
        raise min(problems, key=lambda problem: problem.retry_after_s or 0.0)

    def check(
        self,
        plan: Plan,
        scheduling: SchedulingParams,
        now: float,
        fits: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Puts a smaller model into ``plan`` where its own cannot answer in time; ``fits``: whether one has room.

        Raises:
            ModelUnavailable: no worker serves the model now.
            Overloaded: the answer would be late; with the time to retry.
        """
        problem = self.problem(plan.model, scheduling, now)
        if problem is None:
            return
        # The safety policy's choice of a model is never replaced.
        if scheduling.allow_degraded and plan.route.strategy != ROUTE_STRATEGY_SAFETY:
            for model in scheduling.rules.fallbacks.get(plan.model, ()):
                if fits(model) and self.problem(model, scheduling, now) is None:
                    reason = f"degraded: {problem.message}"
                    plan.move(model, scheduling.rules.models[model].tier, reason)
                    plan.route.reason = f"{plan.route.reason}; {reason}"
                    plan.route.degraded, plan.cascade = True, None
                    return
        raise problem

    def sent(self, model: str, task: str, priority_class: str, tokens: int, now: float) -> None:
        """A task of ``tokens`` tokens, prompt and longest answer, is sent now; it calls ``model`` ``task``."""
        self._breakers.sent(model, now)
        load = self.loads.load(task, now)
        known = load.of_class(priority_class).task_tokens
        self._sent[task].add(priority_class, known or tokens, now, load.reported_at)

    def wait_s(self, model: str, scheduling: SchedulingParams, now: float) -> float:
        """Expected wait for a worker of a task that is sent now."""
        task, priority_class = scheduling.task_of(model), scheduling.priority_class
        load = self.loads.load(task, now)
        state = load.of_class(priority_class)
        reported_s = state.tenant_waits_s.get(scheduling.tenant, state.wait_s)
        if not load.tokens_per_s:
            return reported_s
        sent_s = self._sent[task].tokens_ahead(priority_class, load.reported_at) / load.tokens_per_s
        return max(0.0, reported_s + sent_s - (now - load.reported_at))

    def problem(self, model: str, scheduling: SchedulingParams, now: float) -> SluiceError | None:
        """Why ``model`` cannot answer in time; None when it can."""
        task = scheduling.task_of(model)
        load = self.loads.load(task, now)
        if not load.workers:
            return ModelUnavailable(
                f"no worker serves {model} now", retry_after_s=UNAVAILABLE_RETRY_S
            )
        if (retry_s := self._breakers.retry_after_s(model, now)) > 0:
            return ModelUnavailable(
                f"{model} failed repeatedly: its circuit breaker is open",
                retry_after_s=max(RETRY_MIN_S, retry_s),
            )
        wait_s = self.wait_s(model, scheduling, now)
        if wait_s <= 0:
            return None
        answer_s = wait_s + load.of_class(scheduling.priority_class).service_s
        late_s = answer_s - (scheduling.deadline - now) * (1 - MARGIN)
        if late_s <= 0:
            return None
        return Overloaded(
            f"{model} would take {answer_s:.1f} s, past the deadline",
            retry_after_s=min(max(late_s, RETRY_MIN_S), RETRY_MAX_S),
        )


def _class_load(entries: Sequence[ClassReport]) -> ClassLoad:
    queued = sum(one.queued for one in entries)
    served = [one.service_ms for one in entries if one.service_ms]

    def wait_s(tenant: str) -> float:
        """A task may come to any of the batchers."""
        return fmean(one.tenant_wait_ms.get(tenant, one.expected_wait_ms) for one in entries) / 1e3

    return ClassLoad(
        task_tokens=sum(one.queued_tokens for one in entries) / queued if queued else 0.0,
        wait_s=fmean(one.expected_wait_ms for one in entries) / 1e3,
        service_s=fmean(served) / 1e3 if served else 0.0,
        tenant_waits_s={name: wait_s(name) for one in entries for name in one.tenant_wait_ms},
    )
