"""Overload control: a request that would miss its deadline is degraded to a smaller model or refused.

`OverloadControl.outlook` says when a model would answer a request, and why it cannot in time. Between two reports of
the batchers (`gateway.streaming.load_table`) the expected wait grows by the tasks that this gateway has sent since and
that go before the request, and shrinks as time passes. While a slot is free nothing is refused: without answers a wrong
prediction would never be corrected. `gateway.admission.prediction` has the rest.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.admission.prediction import AnswerKind, AnswerLengths, ExpectedTime, SentTokens
from gateway.routing.breaker import Breakers
from gateway.routing.plan import Plan
from gateway.streaming.load_table import ModelLoad, ModelLoadTable
from sluice.errors import ExpectedLate, ModelUnavailable, SluiceError
from sluice.settings.models import ModelSettings
from sluice.settings.routing import BreakerRules
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_SAFETY
from sluice.wire.subjects import RANKS

SURE_SHARE: Final = 0.8
"""Share of the expected time that must be past the deadline for a refusal: half of the predictions are off by up to a
quarter."""
RETRY_MIN_S: Final = 0.1
"""Shortest time after which a refused caller is told to come back, in seconds."""
RETRY_MAX_S: Final = 60.0
"""Longest time after which a refused caller is told to come back, in seconds: loads change within it."""
UNAVAILABLE_RETRY_S: Final = 1.0
"""When to come back if no worker serves the model, in seconds: a worker may be starting."""


@dataclass(frozen=True)
class OverloadRules:
    """The part of the policies by which a model is refused, or replaced by a smaller one.

    Attributes:
        breaker: When a circuit breaker opens.
        fallbacks: Smaller models by model, in the order in which they are tried.
        models: Models by name, for their tiers and the names that tasks have for them.
        weights: Weights of tenants that differ from 1.
    """

    breaker: BreakerRules = field(default_factory=BreakerRules)
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


NO_RULES: Final = OverloadRules()
"""Rules by which nothing is replaced."""


@dataclass(slots=True, eq=False)
class SchedulingParams:
    """What the expected time of a request's answer depends on: class, deadline, tenant, lengths of its texts.

    Attributes:
        priority_class: Its class.
        deadline: Its deadline, in monotonic seconds.
        allow_degraded: Whether a smaller model may answer.
        tenant: Whose request it is. A tenant that floods a model does not make requests of others hopeless.
        rules: The rules of the policies that it was admitted by.
        workload: The kind of work; answers of one kind have similar lengths.
        prompt_tokens: Estimated length of its prompt; 0 if unknown.
        min_tokens: Least length of the answer.
        max_tokens: Greatest length of the answer; 0 for that of the model.
    """

    priority_class: str
    deadline: float
    allow_degraded: bool = False
    tenant: str = ""
    rules: OverloadRules = NO_RULES
    workload: str = ""
    prompt_tokens: int = 0
    min_tokens: int = 0
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """When a model would answer a request.

    Attributes:
        wait_s: Expected wait for a worker, in seconds.
        problem: Why the model cannot answer in time; None if it can.
    """

    wait_s: float
    problem: SluiceError | None


class OverloadControl:
    """Decides whether a model can still answer in time.

    Attributes:
        loads: What batchers report of the models.
        lengths: Lengths of earlier answers.
        sent_tokens: Tasks that were sent since the last reports, by the model's name in tasks.
    """

    def __init__(self, loads: ModelLoadTable, breakers: Breakers) -> None:
        """Decide by `loads`, and by the circuit breakers of the models."""
        self.loads = loads
        self.lengths = AnswerLengths()
        self._breakers = breakers
        self.sent_tokens: defaultdict[str, SentTokens] = defaultdict(SentTokens)

    def outlook(self, model: str, scheduling: SchedulingParams, now: float) -> Outlook:
        """Return when `model` would answer a request that is sent now."""
        task = _task_name(model, scheduling.rules)
        load = self.loads.load(task, now)
        wait_s = _wait_s(scheduling, load, self.sent_tokens[task], now)
        return Outlook(wait_s, self._problem(model, scheduling, load, wait_s, now))

    def expect(self, model: str, scheduling: SchedulingParams, now: float) -> ExpectedTime:
        """Return how long an answer of `model` would take from now on, as far as that is known."""
        task = _task_name(model, scheduling.rules)
        load = self.loads.load(task, now)
        wait_s = _wait_s(scheduling, load, self.sent_tokens[task], now)
        return self._expect(model, scheduling, load, wait_s)

    def refuse_hopeless(
        self, models: Sequence[str], scheduling: SchedulingParams, now: float
    ) -> None:
        """Refuse a request early if none of `models`, which may answer it, could do so in time.

        Raises:
            ModelUnavailable, ExpectedLate: As `check`.
        """
        candidates = list(models)
        if scheduling.allow_degraded:
            fallbacks = scheduling.rules.fallbacks
            candidates += [name for model in models for name in fallbacks.get(model, ())]
        problems = []
        for model in candidates:
            problem = self.outlook(model, scheduling, now).problem
            if problem is None:
                return
            problems.append(problem)
        raise min(problems, key=lambda problem: problem.retry_after_s or 0.0)

    def check(
        self,
        plan: Plan,
        scheduling: SchedulingParams,
        outlook: Callable[[str], Outlook],
        fits: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Put a smaller model into `plan` if its own cannot answer in time.

        Args:
            plan: Where the request is routed.
            scheduling: The request.
            outlook: Returns when a model would answer it.
            fits: Returns whether the context of a model has room for it.

        Raises:
            ModelUnavailable: No worker serves the model now.
            ExpectedLate: The answer would be late; with the time to retry.
        """
        problem = outlook(plan.model).problem
        if problem is None:
            return
        # The safety policy's choice of a model is never replaced.
        if scheduling.allow_degraded and plan.route.strategy != ROUTE_STRATEGY_SAFETY:
            for model in scheduling.rules.fallbacks.get(plan.model, ()):
                if fits(model) and outlook(model).problem is None:
                    cause, _, _ = problem.message.partition(";")  # what follows is for the caller
                    reason = f"degraded: {cause}"
                    plan.move(model, scheduling.rules.models[model].tier, reason)
                    plan.route.reason = f"{plan.route.reason}; {reason}"
                    plan.route.degraded, plan.cascade = True, None
                    return
        raise problem

    def is_ready(self, model: str, task: str, now: float) -> bool:
        """Return whether `model`, which tasks call `task`, has a worker and does not fail repeatedly."""
        return self.loads.load(task, now).ready and not self._breakers.is_open(model, now)

    def sent(
        self, model: str, task: str, priority_class: str, tokens: int, now: float, tenant: str = ""
    ) -> None:
        """Count a task that is sent now.

        Args:
            model: The model that it is for.
            task: What tasks call the model.
            priority_class: Its class.
            tokens: Length of its prompt and its longest answer, which counts until answers of the class are known.
            now: Monotonic seconds.
            tenant: Whose task it is.
        """
        self._breakers.sent(model, now)
        load = self.loads.load(task, now)
        mean_tokens = load.of_class(priority_class).task_tokens
        rank = RANKS[priority_class]
        self.sent_tokens[task].add(rank, tenant, mean_tokens or tokens, now, load.reported_at)

    def ended(self, model: str, scheduling: SchedulingParams, tokens: int, *, is_cut: bool) -> None:
        """Learn from an answer of `tokens` tokens; `is_cut` says that it reached its `max_tokens`."""
        kind = AnswerKind(model, scheduling.tenant, scheduling.workload)
        self.lengths.observe(kind, tokens, is_cut=is_cut)

    def _expect(
        self,
        model: str,
        scheduling: SchedulingParams,
        load: ModelLoad,
        wait_s: float,
    ) -> ExpectedTime:
        state = load.of_class(scheduling.priority_class)
        kind = AnswerKind(model, scheduling.tenant, scheduling.workload)
        length = self.lengths.expect(kind, scheduling.min_tokens, scheduling.max_tokens)
        return ExpectedTime(
            wait_s,
            state.first_token_s + scheduling.prompt_tokens * state.prompt_token_s,
            (length.tokens - 1) * state.token_s,
            is_total=length.is_known and state.first_token_s + state.prompt_token_s > 0,
            tokens_per_s=load.tokens_per_s,
        )

    def _problem(
        self,
        model: str,
        scheduling: SchedulingParams,
        load: ModelLoad,
        wait_s: float,
        now: float,
    ) -> SluiceError | None:
        """Return why `model` cannot answer in time; None if it can."""
        if not load.workers:
            return ModelUnavailable(
                f"no worker serves {model} now", retry_after_s=UNAVAILABLE_RETRY_S
            )
        if (retry_s := self._breakers.retry_after_s(model, now)) > 0:
            return ModelUnavailable(
                f"{model} failed repeatedly: its circuit breaker is open",
                retry_after_s=max(RETRY_MIN_S, retry_s),
            )
        if wait_s <= 0:
            return None  # a request that does not wait is never refused: it stands before nobody
        expected, left_s = self._expect(model, scheduling, load, wait_s), scheduling.deadline - now
        late_s = expected.total_s - left_s / SURE_SHARE
        return None if late_s <= 0 else _late(model, expected, left_s, min(late_s, wait_s))


def _task_name(model: str, rules: OverloadRules) -> str:
    """Return what tasks call `model`."""
    settings = rules.models.get(model)
    return model if settings is None else settings.task_name


def _wait_s(scheduling: SchedulingParams, load: ModelLoad, sent: SentTokens, now: float) -> float:
    """Return the expected wait for a worker of a task that is sent now, in seconds."""
    rank = RANKS[scheduling.priority_class]
    state = load.of_class(scheduling.priority_class)
    sent.forget(load.reported_at)
    tasks = sent.tasks(rank)
    if tasks < state.free_tasks:
        return 0.0
    wait_s = state.tenant_waits_s.get(scheduling.tenant, state.wait_s)
    if tasks and load.tokens_per_s:
        # Tasks that found a free slot stand before nobody.
        share = 1 - state.free_tasks / tasks
        tokens = sent.tokens_before(rank, scheduling.tenant, scheduling.rules.weights)
        wait_s += share * tokens / load.tokens_per_s
    return max(0.0, wait_s - (now - load.reported_at))


def _late(model: str, expected: ExpectedTime, left_s: float, retry_s: float) -> ExpectedLate:
    """Return the refusal of a request that has `left_s`; after `retry_s` the model would take it."""
    before = ""
    if expected.tokens_per_s:
        before = f" ({expected.tokens_before:,.0f} tokens before it at {expected.tokens_per_s:,.0f} tokens/s)"
    retry_s = min(max(retry_s, RETRY_MIN_S), RETRY_MAX_S)
    return ExpectedLate(
        f"deadline: {max(0.0, left_s):.1f} s left, about {expected.total_s:.1f} s expected of {model}{before};"
        f" retry in {retry_s:.1f} s or raise the timeout",
        retry_after_s=retry_s,
    )
