"""Overload control: a request that would miss its deadline is degraded to a smaller model or refused.

Between two reports of the batchers (`gateway.admission.loads`) the expected wait grows by the tasks that this gateway
has sent since and that go before the request, and shrinks as time passes. While a slot is free nothing is refused:
without answers a wrong prediction would never be corrected. See `gateway.admission.prediction` for the rest.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.admission.loads import ModelLoad, ModelLoadTable
from gateway.admission.prediction import AnswerKind, AnswerLengths, ExpectedTime, SentTokens
from gateway.routing.breaker import Breakers
from gateway.routing.plan import Plan
from sluice.errors import ExpectedLate, ModelUnavailable, SluiceError
from sluice.settings.models import ModelSettings
from sluice.settings.routing import BreakerSettings
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_SAFETY
from sluice.wire.subjects import RANKS

SURE_SHARE: Final = 0.8
"""Share of the expected time that must be past the deadline for a refusal: half of the predictions are off by up to a
quarter."""
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 60.0
UNAVAILABLE_RETRY_S: Final = 1.0


@dataclass(frozen=True)
class OverloadRules:
    """The part of the policies by which a model is refused, or replaced by a smaller one.

    Attributes:
        fallbacks: smaller models by model, in the order in which they are tried.
        models: by name, for their tiers, and for what tasks call them; others are called by their names.
        weights: of tenants that differ from 1.
    """

    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


NO_RULES: Final = OverloadRules()


@dataclass(eq=False)
class SchedulingParams:
    """What the prediction of a request's time depends on: class, deadline, tenant, and the lengths of its texts.

    Attributes:
        priority_class: its class.
        deadline: monotonic seconds.
        allow_degraded: whether a smaller model may answer.
        tenant: whose request it is: one that floods a model does not make those of others hopeless.
        arrived_at: monotonic seconds.
        rules: of the policies that it was admitted by.
        workload: the kind of work, which answers of like lengths have in common.
        prompt_tokens: about so many; 0: not known.
        min_tokens: of the answer.
        max_tokens: of the answer; 0: it has no limit of its own.
    """

    priority_class: str
    deadline: float
    allow_degraded: bool = False
    tenant: str = ""
    arrived_at: float = 0.0
    rules: OverloadRules = NO_RULES
    workload: str = ""
    prompt_tokens: int = 0
    min_tokens: int = 0
    max_tokens: int = 0

    def task_of(self, model: str) -> str:
        """What tasks call ``model``."""
        known = self.rules.models.get(model)
        return model if known is None else known.task_name


class OverloadControl:
    """Decides whether a model can still answer in time.

    Args:
        breakers: circuit breakers of the models.

    Attributes:
        loads: of the models.
        lengths: of earlier answers.
    """

    def __init__(self, loads: ModelLoadTable, breakers: Breakers) -> None:
        self.loads = loads
        self.lengths = AnswerLengths()
        self._breakers = breakers
        self._sent: defaultdict[str, SentTokens] = defaultdict(SentTokens)
        """By what tasks call the model."""

    def refuse_hopeless(
        self, models: Sequence[str], scheduling: SchedulingParams, now: float
    ) -> None:
        """Refuses a request early when none of ``models``, all that may answer it, could do so in time.

        Raises:
            ModelUnavailable, ExpectedLate: as `check`.
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
            ExpectedLate: the answer would be late; with the time to retry.
        """
        problem = self.problem(plan.model, scheduling, now)
        if problem is None:
            return
        # The safety policy's choice of a model is never replaced.
        if scheduling.allow_degraded and plan.route.strategy != ROUTE_STRATEGY_SAFETY:
            for model in scheduling.rules.fallbacks.get(plan.model, ()):
                if fits(model) and self.problem(model, scheduling, now) is None:
                    cause, _, _ = problem.message.partition(";")  # not what the caller could do
                    reason = f"degraded: {cause}"
                    plan.move(model, scheduling.rules.models[model].tier, reason)
                    plan.route.reason = f"{plan.route.reason}; {reason}"
                    plan.route.degraded, plan.cascade = True, None
                    return
        raise problem

    def is_ready(self, model: str, task: str, now: float) -> bool:
        """Return whether ``model``, which tasks call ``task``, has a worker and does not fail repeatedly."""
        return self.loads.load(task, now).ready and not self._breakers.is_open(model, now)

    def sent(
        self, model: str, task: str, priority_class: str, tokens: int, now: float, tenant: str = ""
    ) -> None:
        """A task of ``tokens`` tokens, prompt and longest answer, is sent now; it calls ``model`` ``task``."""
        self._breakers.sent(model, now)
        load = self.loads.load(task, now)
        known = load.of_class(priority_class).task_tokens
        rank = RANKS[priority_class]
        self._sent[task].add(rank, tenant, known or tokens, now, load.reported_at)

    def ended(self, model: str, scheduling: SchedulingParams, tokens: int, *, is_cut: bool) -> None:
        """Learn from an answer of ``tokens`` tokens; ``is_cut``: it reached its ``max_tokens``."""
        kind = AnswerKind(model, scheduling.tenant, scheduling.workload)
        self.lengths.observe(kind, tokens, is_cut=is_cut)

    def wait_s(self, model: str, scheduling: SchedulingParams, now: float) -> float:
        """Return the expected wait for a worker of a task that is sent now."""
        task = scheduling.task_of(model)
        return self._wait_s(task, self.loads.load(task, now), scheduling, now)

    def _wait_s(
        self, task: str, load: ModelLoad, scheduling: SchedulingParams, now: float
    ) -> float:
        rank, sent = RANKS[scheduling.priority_class], self._sent[task]
        state = load.of_class(scheduling.priority_class)
        sent.forget(load.reported_at)
        tasks = sent.tasks(rank)
        if tasks < state.free_rows:
            return 0.0
        wait_s = state.tenant_waits_s.get(scheduling.tenant, state.wait_s)
        if tasks and load.tokens_per_s:
            # Those that had a free slot are before nobody.
            share = 1 - state.free_rows / tasks
            tokens = sent.tokens_before(rank, scheduling.tenant, scheduling.rules.weights)
            wait_s += share * tokens / load.tokens_per_s
        return max(0.0, wait_s - (now - load.reported_at))

    def predict(self, model: str, scheduling: SchedulingParams, now: float) -> ExpectedTime:
        """Return how long an answer of ``model`` would take from now on, as far as it is known."""
        task = scheduling.task_of(model)
        load = self.loads.load(task, now)
        state = load.of_class(scheduling.priority_class)
        kind = AnswerKind(model, scheduling.tenant, scheduling.workload)
        length = self.lengths.expect(kind, scheduling.min_tokens, scheduling.max_tokens)
        return ExpectedTime(
            self._wait_s(task, load, scheduling, now),
            state.first_token_s + scheduling.prompt_tokens * state.prompt_token_s,
            (length.tokens - 1) * state.token_s,
            is_total=length.is_known and state.first_token_s + state.prompt_token_s > 0,
            tokens_per_s=load.tokens_per_s,
        )

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
        if self._wait_s(task, load, scheduling, now) <= 0:
            return None
        expected, left_s = self.predict(model, scheduling, now), scheduling.deadline - now
        late_s = expected.total_s - left_s / SURE_SHARE
        if late_s <= 0:
            return None
        return _late(model, expected, left_s, min(late_s, expected.wait_s))


def _late(model: str, expected: ExpectedTime, left_s: float, retry_s: float) -> ExpectedLate:
    """Return the refusal of a request that has ``left_s``; after ``retry_s`` the model would take it."""
    before = ""
    if expected.tokens_per_s:
        before = f" ({expected.tokens_before:,.0f} tokens before it at {expected.tokens_per_s:,.0f} tokens/s)"
    retry_s = min(max(retry_s, RETRY_MIN_S), RETRY_MAX_S)
    return ExpectedLate(
        f"deadline: {max(0.0, left_s):.1f} s left, about {expected.total_s:.1f} s expected of {model}{before};"
        f" retry in {retry_s:.1f} s or raise the timeout",
        retry_after_s=retry_s,
    )
