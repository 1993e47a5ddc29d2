"""Overload control by expected wait: a request that would miss its deadline is degraded to a smaller model or refused.

A batcher reports how long a new task of each class would wait, and how long answers take. Between two reports the
estimate grows by the tasks that this gateway has sent since, and shrinks as time passes. While no task waits, no
request is refused: without answers a wrong estimate would never be corrected.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.admission.load_table import ModelLoadTable
from gateway.routing.breaker import Breakers
from gateway.routing.plan import SAFETY, Candidate, Plan
from gateway.routing.router import ModelFacts
from sluice.errors import ModelUnavailable, Overloaded, SluiceError
from sluice.settings.routing import BreakerSettings
from sluice.wire.subjects import CLASSES, RANKS

MARGIN: Final = 0.2
"""Share of the time to the deadline that is kept in reserve for errors of the estimates. Without it half of the
requests that are just admitted would be late, each instead of one in time."""

RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 60.0
UNAVAILABLE_RETRY_S: Final = 1.0


@dataclass(frozen=True)
class OverloadRules:
    """The part of the policies by which a model is refused, or replaced by a smaller one.

    Attributes:
        fallbacks: smaller models by model, in the order in which they are tried.
        models: by name, for their tiers.
        tasks: what tasks call each model; others are called by their names.
    """

    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    models: Mapping[str, ModelFacts] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)


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
        return self.rules.tasks.get(model, model)


class _Sent:
    """Tasks that this gateway has sent to a model since the batchers' reports, by class."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[float, int, float]] = deque()
        self._counts = [0] * len(CLASSES)
        self._tokens = [0.0] * len(CLASSES)

    def add(self, priority_class: str, tokens: float, now: float) -> None:
        rank = RANKS[priority_class]
        self._tasks.append((now, rank, tokens))
        self._counts[rank] += 1
        self._tokens[rank] += tokens

    def forget(self, until: float) -> None:
        while self._tasks and self._tasks[0][0] <= until:
            _, rank, tokens = self._tasks.popleft()
            self._counts[rank] -= 1
            self._tokens[rank] -= tokens

    def count(self, priority_class: str) -> int:
        return self._counts[RANKS[priority_class]]

    def tokens_ahead(self, priority_class: str) -> float:
        """Of this class and the more urgent ones."""
        return sum(self._tokens[: RANKS[priority_class] + 1])


class OverloadControl:
    """Decides whether a model can still answer in time.

    Args:
        queue_max: tasks of a model and class that may wait.
        breakers: circuit breakers of the models.
    """

    def __init__(self, loads: ModelLoadTable, queue_max: int, breakers: Breakers) -> None:
        self._loads = loads
        self._queue_max = queue_max
        self._breakers = breakers
        self._sent: defaultdict[str, _Sent] = defaultdict(_Sent)
        """By what tasks call the model."""

    def refuse_hopeless(
        self, models: Sequence[str], scheduling: SchedulingParams, now: float
    ) -> None:
        """Refuses a request early when none of ``models``, all that may answer it, could do so in time.

        Raises:
            ModelUnavailable, Overloaded: as `choose`.
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

    def choose(self, plan: Plan, scheduling: SchedulingParams, now: float) -> Plan:
        """``plan``, or one with a smaller model that can answer in time.

        Raises:
            ModelUnavailable: no worker serves the model now.
            Overloaded: the answer would be late, or the queue is full; with the time to retry.
        """
        problem = self.problem(plan.model, scheduling, now)
        if problem is None:
            return plan
        # The safety policy's choice of a model is never replaced.
        if scheduling.allow_degraded and plan.strategy != SAFETY:
            for model in scheduling.rules.fallbacks.get(plan.model, ()):
                if self.problem(model, scheduling, now) is None:
                    return _degraded(plan, model, scheduling.rules.models[model], problem.message)
        raise problem

    def sent(self, model: str, task: str, priority_class: str, tokens: int, now: float) -> None:
        """A task of ``tokens`` tokens, prompt and longest answer, is sent now; it calls ``model`` ``task``."""
        self._breakers.sent(model, now)
        known = self._loads.load(task, now).of_class(priority_class).task_tokens
        self._sent[task].add(priority_class, known or tokens, now)

    def wait_s(self, model: str, scheduling: SchedulingParams, now: float) -> float:
        """Expected wait for a worker of a task that is sent now."""
        task, priority_class = scheduling.task_of(model), scheduling.priority_class
        load, sent = self._loads.load(task, now), self._sent[task]
        sent.forget(load.reported_at)
        state = load.of_class(priority_class)
        reported_s = state.tenant_waits_s.get(scheduling.tenant, state.wait_s)
        if not load.tokens_per_s:
            return reported_s
        sent_s = sent.tokens_ahead(priority_class) / load.tokens_per_s
        return max(0.0, reported_s + sent_s - (now - load.reported_at))

    def serves(self, task: str, now: float) -> bool:
        """Whether a worker of that version of a model is alive."""
        return self._loads.load(task, now).ready

    def problem(self, model: str, scheduling: SchedulingParams, now: float) -> SluiceError | None:
        """Why ``model`` cannot answer in time; None when it can."""
        task, breaker = scheduling.task_of(model), scheduling.rules.breaker
        load = self._loads.load(task, now)
        if not load.ready:
            return ModelUnavailable(
                f"no worker serves {model} now", retry_after_s=UNAVAILABLE_RETRY_S
            )
        if not self._breakers.allows(model, breaker, now):
            retry_s = max(RETRY_MIN_S, self._breakers.retry_after_s(model, breaker, now))
            return ModelUnavailable(
                f"{model} failed repeatedly: its circuit breaker is open",
                retry_after_s=retry_s,
            )
        state = load.of_class(scheduling.priority_class)
        wait_s, sent = self.wait_s(model, scheduling, now), self._sent[task]
        answer_s = wait_s + state.service_s
        late_s = answer_s - (scheduling.deadline - now) * (1 - MARGIN)
        if wait_s > 0 and late_s > 0:
            return _overloaded(f"{model} would take {answer_s:.1f} s, past the deadline", late_s)
        if state.queued + sent.count(scheduling.priority_class) >= self._queue_max:
            return _overloaded(f"{self._queue_max} requests wait for {model}", wait_s)
        return None


def _degraded(plan: Plan, model: str, facts: ModelFacts, problem: str) -> Plan:
    reason = f"degraded: {problem}"
    first = Candidate(model, facts.tier, reason)
    return replace(
        plan,
        model=model,
        tier=first.tier,
        reason=f"{plan.reason}; {reason}",
        degraded=True,
        candidates=(first, *(one for one in plan.candidates if one.model != model)),
        cascade=None,
    )


def _overloaded(message: str, retry_s: float) -> Overloaded:
    return Overloaded(message, retry_after_s=min(max(retry_s, RETRY_MIN_S), RETRY_MAX_S))
