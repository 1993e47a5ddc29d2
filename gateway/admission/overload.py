"""Overload control: a request that would miss its deadline is degraded to a smaller model or refused.

`OverloadControl.outlook` says when a model would answer a request, and why it cannot in time. An answer takes

    wait for a worker + time to the first token + time for the other tokens

1. Waits and speeds come from the batchers' reports (`gateway.streaming.load_table`). Between two reports the wait grows
   by the tasks that this gateway has sent since and that go before the request, and shrinks as time passes.
2. While a slot is free nothing is refused: without answers a wrong prediction would never be corrected.
3. The length of an answer is the smaller of `max_tokens` and the median of earlier answers of the same model, tenant
   and workload; it is at least `min_tokens`. While it is unknown only the first token is predicted: long answers of
   others say nothing about a short one.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median_low
from typing import Final, NamedTuple

from gateway.routing.router import Plan
from gateway.streaming.load_table import Breakers, ModelLoad, ModelLoadTable
from gateway.streaming.model_run import ModelRun, ResultCollector
from sluice.errors import DeadlinePassed, EngineFailed, ExpectedLate, ModelUnavailable, SluiceError
from sluice.internal.v1.frame_pb2 import TASK_END_LENGTH
from sluice.settings.models import ModelSettings
from sluice.settings.routing import BreakerRules
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_SAFETY
from sluice.wire.subjects import CLASSES, RANKS

SURE_SHARE: Final = 0.8
"""A request is refused if even this share of the expected time is more than the time left: half of the predictions are
off by up to a quarter."""
RETRY_MIN_S: Final = 0.1
"""Shortest time after which a refused caller is told to come back, in seconds."""
RETRY_MAX_S: Final = 60.0
"""Longest time after which a refused caller is told to come back, in seconds: loads change within it."""
UNAVAILABLE_RETRY_S: Final = 1.0
"""When to come back if no worker serves the model, in seconds: a worker may be starting."""
ANSWERS_MIN: Final = 8
"""Answers of a kind that must have ended before their length is predicted."""
ANSWERS_MAX: Final = 64
"""Answers of a kind that are kept; the oldest is dropped first."""
KINDS_MAX: Final = 4096
"""Models, tenants and workloads that are kept; the oldest is dropped first."""

HUNG_S: Final = 10.0
"""How long a model may give no token to any task, while one waits for it, until it counts as hung, in seconds."""


@dataclass(frozen=True)
class OverloadRules:
    """The part of the policies by which a model is refused, or replaced by a smaller one.

    Attributes:
        breaker: When a circuit breaker opens.
        fallbacks: Smaller models by model, in the order in which they are tried.
        models: Models by name, for their tiers.
        tasks: Names of models in tasks, by model; one without an entry has the same name there.
        weights: Weights of tenants that differ from 1.
    """

    breaker: BreakerRules = field(default_factory=BreakerRules)
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    tasks: Mapping[str, str] = field(default_factory=dict)
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
        arrived_at: When it came, in monotonic seconds.
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
    arrived_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """When a model would answer a request, as far as that is known.

    Attributes:
        wait_s: Expected wait for a worker, in seconds.
        total_s: Expected time until the last token that is predicted, in seconds.
        is_total: Whether that is the whole answer: its length and the speed of the workers are known.
        problem: Why the model cannot answer in time; None if it can.
    """

    wait_s: float
    total_s: float
    is_total: bool
    problem: SluiceError | None


class AnswerKind(NamedTuple):
    """Answers of similar lengths."""

    model: str
    tenant: str
    workload: str


class AnswerLength(NamedTuple):
    """The expected length of an answer.

    Attributes:
        tokens: Its length.
        is_known: Whether that is the length; else it is the least.
    """

    tokens: int
    is_known: bool


class AnswerLengths:
    """Lengths of earlier answers by kind."""

    def __init__(self) -> None:
        self._kinds: dict[AnswerKind, deque[tuple[int, bool]]] = {}
        """The latest lengths, each with whether the answer was cut there."""

    def __len__(self) -> int:
        return len(self._kinds)

    def observe(self, kind: AnswerKind, tokens: int, *, is_cut: bool) -> None:
        """Add the length of an answer; `is_cut` says that it ended because it reached its `max_tokens`."""
        lengths = self._kinds.get(kind)
        if lengths is None:
            if len(self._kinds) >= KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
            lengths = self._kinds[kind] = deque(maxlen=ANSWERS_MAX)
        # An answer that was cut below the median might have become longer than that, or not.
        if not (is_cut and lengths and tokens < median_low(lengths)[0]):
            lengths.append((tokens, is_cut))

    def expect(self, kind: AnswerKind, min_tokens: int, max_tokens: int) -> AnswerLength:
        """Return the expected length of an answer; `max_tokens` is 0 if it has no limit of its own."""
        least, lengths = max(1, min_tokens), self._kinds.get(kind, ())
        if max_tokens and max_tokens <= least:
            return AnswerLength(least, is_known=True)
        if len(lengths) < ANSWERS_MIN:
            return AnswerLength(least, is_known=False)
        tokens, is_cut = median_low(lengths)
        if max_tokens and max_tokens <= tokens:
            return AnswerLength(max_tokens, is_known=True)
        return AnswerLength(max(least, tokens), is_known=not is_cut or tokens < least)


class SentTokens:
    """Tasks that this gateway has sent to a model since the batchers' reports.

    Attributes:
        tasks: Their number by rank of their class.
    """

    def __init__(self) -> None:
        self._sent: deque[tuple[float, int, str, float]] = deque()
        self.tasks = [0] * len(CLASSES)
        self._tokens = [0.0] * len(CLASSES)
        self._tenants: list[dict[str, float]] = [{} for _ in CLASSES]
        """Tokens of each tenant, by rank."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, rank: int, tenant: str, tokens: float, now: float, since: float) -> None:
        """Add a task of the class with `rank`; drop tasks that were sent until `since`."""
        self.forget(since)
        self._sent.append((now, rank, tenant, tokens))
        self.tasks[rank] += 1
        self._tokens[rank] += tokens
        tenants = self._tenants[rank]
        tenants[tenant] = tenants.get(tenant, 0.0) + tokens

    def forget(self, since: float) -> None:
        """Drop the tasks that were sent until `since`."""
        while self._sent and self._sent[0][0] <= since:
            _, rank, tenant, tokens = self._sent.popleft()
            self.tasks[rank] -= 1
            if not self.tasks[rank]:
                self._tokens[rank] = 0.0
                self._tenants[rank].clear()
                continue
            self._tokens[rank] -= tokens
            self._tenants[rank][tenant] -= tokens

    def tokens_before(self, rank: int, tenant: str, weights: Mapping[str, float]) -> float:
        """Return the tokens that go before a new task of the class with `rank` and the tenant.

        These are the tokens of more urgent classes, and of its class the tenant's own with the fair share of others.
        """
        of_class, tenants = self._tokens[rank], self._tenants[rank]
        own, weight = tenants.get(tenant, 0.0), weights.get(tenant, 1.0)
        if own and own < of_class:
            all_weights = sum(weights.get(name, 1.0) for name, sent in tenants.items() if sent > 0)
            own *= all_weights / weight
        return sum(self._tokens[:rank]) + min(of_class, own)


class OverloadControl:
    """Decides whether a model can still answer in time; the end of each run says more of its model.

    Attributes:
        loads: What batchers report of the models.
        breakers: Circuit breakers of the models.
        lengths: Lengths of earlier answers.
        sent_tokens: Tasks that were sent since the last reports, by the model's name in tasks.
    """

    def __init__(self, loads: ModelLoadTable, streams: Iterable[ResultCollector]) -> None:
        """Decide by `loads`, and by what becomes of the live `streams`."""
        self.loads = loads
        self.breakers = Breakers()
        self.lengths = AnswerLengths()
        self.sent_tokens: defaultdict[str, SentTokens] = defaultdict(SentTokens)
        self._streams = streams
        self._last_token_at: dict[str, float] = {}
        """When runs that have ended got their last token, by model."""

    def outlook(self, model: str, scheduling: SchedulingParams, now: float) -> Outlook:
        """Return when `model` would answer a request that is sent now."""
        load = self.loads.load(scheduling.rules.tasks.get(model, model), now)
        state = load.classes[scheduling.priority_class]
        wait_s = self._wait_s(model, scheduling, load, now)
        kind = AnswerKind(model, scheduling.tenant, scheduling.workload)
        length = self.lengths.expect(kind, scheduling.min_tokens, scheduling.max_tokens)
        first_token_s = state.first_token_s + scheduling.prompt_tokens * state.prompt_token_s
        total_s = wait_s + first_token_s + (length.tokens - 1) * state.token_s
        is_total = length.is_known and state.first_token_s + state.prompt_token_s > 0
        left_s = scheduling.deadline - now
        late_s = total_s - left_s / SURE_SHARE
        problem: SluiceError | None = None
        if not load.workers:
            message = f"no worker serves {model} now"
            problem = ModelUnavailable(message, retry_after_s=UNAVAILABLE_RETRY_S)
        elif (retry_s := self.breakers.retry_after_s(model, now)) > 0:
            problem = ModelUnavailable(
                f"{model} failed repeatedly: its circuit breaker is open",
                retry_after_s=max(RETRY_MIN_S, retry_s),
            )
        elif wait_s > 0 and late_s > 0:  # a request that does not wait stands before nobody
            tokens_before = (wait_s * load.tokens_per_s, load.tokens_per_s)
            problem = _late(model, left_s, total_s, tokens_before, min(late_s, wait_s))
        return Outlook(wait_s, total_s, is_total, problem)

    def _wait_s(
        self, model: str, scheduling: SchedulingParams, load: ModelLoad, now: float
    ) -> float:
        """Return the expected wait for a worker of a task that is sent now, in seconds."""
        rank, state = RANKS[scheduling.priority_class], load.classes[scheduling.priority_class]
        sent = self.sent_tokens[scheduling.rules.tasks.get(model, model)]
        sent.forget(load.reported_at)
        tasks = sum(sent.tasks[: rank + 1])
        if tasks < state.free_tasks:
            return 0.0
        wait_s = state.tenant_waits_s.get(scheduling.tenant, state.wait_s)
        if tasks and load.tokens_per_s:
            # Tasks that found a free slot stand before nobody.
            share = 1 - state.free_tasks / tasks
            tokens = sent.tokens_before(rank, scheduling.tenant, scheduling.rules.weights)
            wait_s += share * tokens / load.tokens_per_s
        return max(0.0, wait_s - (now - load.reported_at))

    def refuse_hopeless(
        self, models: Sequence[str], scheduling: SchedulingParams, now: float
    ) -> None:
        """Refuse a request early if none of `models`, which may answer it, could do so in time.

        Raises:
            ModelUnavailable: No worker serves the models, or they failed repeatedly.
            ExpectedLate: The answer would be late; with the time to retry.
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

    def degrade(
        self,
        plan: Plan,
        problem: SluiceError,
        scheduling: SchedulingParams,
        now: float,
        fits: Callable[[str], bool] = lambda _: True,
    ) -> bool:
        """Put a smaller model into `plan`, if one can answer in time; return whether there is one.

        Args:
            plan: Where the request is routed.
            problem: Why the model of the plan cannot answer.
            scheduling: The request.
            now: Monotonic seconds.
            fits: Returns whether the context of a model has room for the request.
        """
        # The safety policy's choice of a model is never replaced.
        if plan.strategy == ROUTE_STRATEGY_SAFETY or not scheduling.allow_degraded:
            return False
        for model in scheduling.rules.fallbacks.get(plan.model, ()):
            if fits(model) and self.outlook(model, scheduling, now).problem is None:
                cause, _, _ = problem.message.partition(";")  # what follows is for the caller
                plan.degrade(scheduling.rules.models[model], cause)
                return True
        return False

    def is_ready(self, model: str, task: str, now: float) -> bool:
        """Return whether `model`, which tasks call `task`, has a worker and does not fail repeatedly."""
        return self.loads.load(task, now).ready and not self.breakers.retry_after_s(model, now)

    def sent(
        self, model: str, task: str, priority_class: str, tokens: int, now: float, tenant: str = ""
    ) -> None:
        """Count a task that is sent now, also as a probe if the model's breaker is not closed.

        Args:
            model: The model that it is for.
            task: What tasks call the model.
            priority_class: Its class.
            tokens: Length of its prompt and its longest answer; counts where reports have no mean of the class.
            now: Monotonic seconds.
            tenant: Whose task it is.
        """
        self.breakers.sent(model, now)
        load = self.loads.load(task, now)
        mean_tokens = load.classes[priority_class].task_tokens
        rank = RANKS[priority_class]
        self.sent_tokens[task].add(rank, tenant, mean_tokens or tokens, now, load.reported_at)

    def record_result(
        self, scheduling: SchedulingParams, run: ModelRun, error: SluiceError | None, now: float
    ) -> None:
        """Judge a model by a run that has ended, with `error` or without.

        Errors that are not the model's fault count neither way.
        """
        model = run.model
        last = max(self._last_token_at.get(model, -inf), run.last_token_at)
        self._last_token_at[model] = last
        if error is None:
            self.breakers.succeeded(model)
            if run.completion_tokens and not run.resumed:
                is_cut = run.final is not None and run.final.end == TASK_END_LENGTH
                kind = AnswerKind(model, scheduling.tenant, scheduling.workload)
                self.lengths.observe(kind, run.completion_tokens, is_cut=is_cut)
        elif isinstance(error, (EngineFailed, ModelUnavailable)) or (
            isinstance(error, DeadlinePassed) and self._is_hung(run, now)
        ):
            self.breakers.failed(model, scheduling.rules.breaker, now)
        else:
            self.breakers.abandoned(model)

    def _is_hung(self, run: ModelRun, now: float) -> bool:
        """Return whether nobody got a token of the model for `HUNG_S` while the run waited for one.

        A shorter deadline proves nothing; nor does a wait while the model works for others.
        """
        since = now - HUNG_S
        if not run.was_accepted or max(run.sent_at, self._last_token_at[run.model]) > since:
            return False
        live = (other for stream in self._streams for other in stream.runs)
        return not any(other.last_token_at > since for other in live if other.model == run.model)


def _late(
    model: str, left_s: float, total_s: float, before: tuple[float, float], retry_s: float
) -> ExpectedLate:
    """Return the refusal of a request that has `left_s`; after `retry_s` the model would take it.

    `before` has the tokens that are computed before the request, and the rate of the workers; 0 if that is unknown.
    """
    tokens, tokens_per_s = before
    queue = (
        f" ({tokens:,.0f} tokens before it at {tokens_per_s:,.0f} tokens/s)" if tokens_per_s else ""
    )
    retry_s = min(max(retry_s, RETRY_MIN_S), RETRY_MAX_S)
    return ExpectedLate(
        f"deadline: {max(0.0, left_s):.1f} s left, about {total_s:.1f} s expected of {model}{queue};"
        f" retry in {retry_s:.1f} s or raise the timeout",
        retry_after_s=retry_s,
    )
