"""Decides which model answers a request, by the section `routing` of the configuration.

The questions below are answered in this order. The first answer names the model; later ones may
replace it.

1. Does the safety policy send the request to a governed model? Then nothing below applies.
2. Does the caller name a model?
3. Which rule of the policy matches? The policy is that of the first selection that matches tenant
   and labels.
4. What does the learned router predict? Without one the policy's default answers.
5. Has the tenant spent its budget? Then the budget's model answers, even if the caller names a
   dearer one. Is the wait too long? Then the model named for that answers.
6. Is the request drawn for a canary of the model?
7. May the answer escalate to a second model (cascade)?

In questions 3 and 4 a model whose context has no room for the request is replaced by the next one
that has. In questions 5 to 7 it is not used, except that of a budget if the caller names a model.
"""

import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import re2
from numpy.typing import NDArray

from gateway.routing.features import Features
from gateway.routing.learned.model import HeadKey, LearnedHead, policy_key
from sluice.errors import SettingsError
from sluice.settings.models import ModelSettings
from sluice.settings.routing import (
    CascadeRoute,
    LearnedRoute,
    LoadRoute,
    RouteRule,
    RoutingPolicy,
    RoutingSettings,
    Selection,
    Trial,
)
from sluice.v1 import admin_pb2
from sluice.v1 import inference_pb2 as pb
from sluice.wire.clock import set_duration
from sluice.wire.enums import word_of

CHARS_PER_TOKEN: Final = 4
"""Estimated characters of a token, used until the model is known."""
SHADOW: Final = "shadow "
"""Salt of the draws for shadows, so that they are independent of those for canaries."""
SEARCH_CHARS: Final = 16_384
"""Length of a turn that `contains` searches, from its beginning, in characters. It bounds the time on
the event loop.
"""
_PATTERNS_CACHED: Final = 1024
"""Sets of patterns that stay compiled."""


def price_of(model: ModelSettings, prompt_tokens: float, answer_tokens: float) -> float:
    """Return the cost of a prompt and its answer, in the currency of the prices."""
    return (prompt_tokens * model.prompt_price + answer_tokens * model.answer_price) / 1e6


@dataclass
class Plan:
    """Names the model that answers, and why.

    The router makes a plan. Overload control, a fallback, a resumed request and a cascade's score change it later.

    Attributes:
        strategy: what decided.
        reason: why, for people.
        candidates: models that could answer, best first; the first one answers first.
        reasons: why each of them may answer.
        versions: version of each thing that the decision was made with.
        policy: name of the routing policy; "" is the section `routing` itself.
        degraded: whether a smaller model took over.
        cascade: how the answer may escalate to a second model; None if it may not.
        answer_predictor: learned head that judges the first answer, if there is one.
        scores: what learned heads predicted, in the order in which they were asked.
        qualities: chance that the answer is right, by model, where it was predicted.
        costs: estimated cost by model, in the currency of the prices.
        waits_s: expected wait by model, in seconds.
    """

    strategy: pb.RouteStrategy.ValueType
    reason: str
    candidates: list[ModelSettings]
    reasons: dict[str, str]
    versions: dict[str, str]
    policy: str = ""
    degraded: bool = False
    cascade: CascadeRoute | None = None
    answer_predictor: LearnedHead | None = None
    scores: list[admin_pb2.RouterScore] = field(default_factory=list)
    qualities: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    waits_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Model that answers first."""
        return self.candidates[0].name

    @property
    def strategy_word(self) -> str:
        """Name of the strategy that decided."""
        return word_of(pb.RouteStrategy, self.strategy)

    def record(self) -> admin_pb2.RouteRecord:
        """Return the plan for the record of the request."""
        record = admin_pb2.RouteRecord(
            strategy=self.strategy,
            reason=self.reason,
            degraded=self.degraded,
            versions=self.versions,
            scores=self.scores,
        )
        for model in self.candidates:
            name = model.name
            candidate = record.candidates.add(
                model=name,
                tier=model.tier,
                reason=self.reasons[name],
                quality=self.qualities.get(name),
                cost=self.costs.get(name, 0.0),
            )
            if wait_s := self.waits_s.get(name):
                set_duration(candidate.expected_wait, wait_s * 1e3)
        return record

    def move(self, model: ModelSettings, reason: str, *, last: bool = False) -> None:
        """Make `model` the first candidate, or the last one, for `reason`."""
        others = [other for other in self.candidates if other.name != model.name]
        self.candidates = [*others, model] if last else [model, *others]
        self.reasons[model.name] = reason

    def degrade(self, model: ModelSettings, cause: str) -> None:
        """Let a smaller `model` answer instead, without a cascade, because of `cause`."""
        reason = f"degraded: {cause}"
        self.move(model, reason)
        self.reason = f"{self.reason}; {reason}"
        self.degraded, self.cascade = True, None


class RoutingState(NamedTuple):
    """What routing reads of the running mesh, for one request.

    Attributes:
        wait_s: expected wait for a worker of a model, in seconds.
        spent: cost of a tenant in the last hour, in the currency of the prices.
        soft_limit: replacement model of a tenant that is near a limit, and why; None if it is not.
            Unset where no tenant has limits.
        fits: whether the context of a model may have room for the request. If no model has, the
            chosen one stays in the plan.
    """

    wait_s: Callable[[str], float] = lambda _: 0.0
    spent: Callable[[str], float] = lambda _: 0.0
    soft_limit: Callable[[str], tuple[str, str] | None] | None = None
    fits: Callable[[str], bool] = lambda _: True


_IDLE: Final = RoutingState()
"""State of a mesh without load, and of tenants without limits."""


class Router:
    """Chooses the model by the section `routing`.

    Args:
        models: settings by name.
        heads: learned heads that the policies name.
        version: hash of the section.

    Attributes:
        needs_prompt_tokens: whether a rule reads `Features.prompt_tokens`, which take time to
            count.
    """

    def __init__(
        self,
        settings: RoutingSettings,
        models: Mapping[str, ModelSettings],
        heads: Iterable[LearnedHead] = (),
        version: str = "",
    ) -> None:
        self._settings = settings
        self._models = models
        self._heads = {(head.by.policy, head.by.head): head for head in heads}
        self._version = version
        self._spares = _spares(settings, models)
        policies = (settings, *settings.policies.values())
        rules = [rule for policy in policies for rule in policy.rules]
        self.needs_prompt_tokens = any(rule.min_prompt_tokens is not None for rule in rules)

    @property
    def versions(self) -> list[str]:
        """Versions of the section and of the learned routers in use."""
        return [self._version, *sorted(map(str, self.held_out))]

    @property
    def held_out(self) -> dict[HeadKey, NDArray[np.float32]]:
        """Gains that each learned head predicted for the rows held out of its training."""
        return {head.by: head.gains for head in self._heads.values()}

    def plan(self, features: Features, state: RoutingState = _IDLE) -> Plan:
        """Return the plan for a request. A pure function."""
        selections = self._settings.select
        chosen = (selection.policy for selection in selections if selects(selection, features))
        name = next(chosen, "")
        policy = self._settings.policies.get(name, self._settings)
        model, strategy, reason = _chosen(policy, features)
        plan = Plan(
            strategy,
            reason,
            [self._models[model]],
            {model: reason},
            {"routing": self._version},
            name,
        )
        is_governed = features.governed is not None
        if strategy == pb.ROUTE_STRATEGY_LEARNED and policy.learned is not None:
            self._predict(plan, policy.learned, features)
        # A governed model is final, and only the model of a resumed answer can continue it.
        if not is_governed and not features.resumed:
            if strategy != pb.ROUTE_STRATEGY_PINNED and not state.fits(plan.model):
                self._make_room(plan, state.fits)
            if policy.budgets or state.soft_limit is not None:
                self._limit_cost(plan, policy, features.tenant, state)
        # A pinned model was asked for; one that a budget chose must not be replaced by a dearer one.
        final = pb.ROUTE_STRATEGY_PINNED, pb.ROUTE_STRATEGY_BUDGET
        if not is_governed and plan.strategy not in final:
            if policy.load is not None and state.fits(policy.load.model):
                self._avoid_wait(plan, policy.load, state)
            if policy.canaries:
                self._try_canary(plan, policy, features.key, state)
            if policy.cascade is not None and plan.model == policy.cascade.first:
                self._add_second(plan, policy.cascade, state)
        # The tokenizer depends on the model, so the length is an estimate until one is chosen.
        prompt_tokens = features.prompt_tokens or len(features.text) / CHARS_PER_TOKEN
        plan.costs = {
            model.name: price_of(model, prompt_tokens, features.answer_tokens)
            for model in plan.candidates
        }
        plan.waits_s = {model.name: state.wait_s(model.name) for model in plan.candidates}
        return plan

    def _predict(self, plan: Plan, learned: LearnedRoute, features: Features) -> None:
        """Let the model that the policy's head predicts answer first, and the other one after it."""
        head = self._heads[policy_key(plan.policy), admin_pb2.ROUTER_HEAD_PROMPT]
        prediction = head.predict(features.text)
        first, second = learned.weak, learned.strong
        if prediction.strong:
            first, second = second, first
        plan.move(self._models[first], prediction.reason)
        plan.move(self._models[second], prediction.reason, last=True)
        plan.reason, plan.qualities = prediction.reason, prediction.score.chances
        plan.versions["router"] = prediction.score.version
        plan.scores.append(prediction.score)

    def _limit_cost(
        self, plan: Plan, policy: RoutingPolicy, tenant: str, state: RoutingState
    ) -> None:
        """Let a cheaper model answer if the tenant is near or over a limit."""
        soft = None
        if state.soft_limit is not None and plan.strategy != pb.ROUTE_STRATEGY_PINNED:
            soft = state.soft_limit(tenant)
        if soft is not None and state.fits(soft[0]) and not self._is_cheap(plan.model, soft[0]):
            self._replace(plan, soft[0], pb.ROUTE_STRATEGY_BUDGET, soft[1])
        else:
            self._keep_budget(plan, policy, tenant, state)

    def _avoid_wait(self, plan: Plan, load: LoadRoute, state: RoutingState) -> None:
        """Let another model answer if the wait for the chosen one is too long."""
        late_s = state.wait_s(plan.model)
        if late_s > load.max_wait_s:
            reason = f"{plan.model} would wait {late_s:.1f} s, more than {load.max_wait_s:g} s"
            self._replace(plan, load.model, pb.ROUTE_STRATEGY_LOAD, reason)

    def _try_canary(self, plan: Plan, policy: RoutingPolicy, key: str, state: RoutingState) -> None:
        """Let the first canary answer that the request is drawn for, if it has room."""
        trial = next(iter(drawn(policy.canaries, plan.model, key)), None)
        if trial is not None and state.fits(trial.model):
            reason = f"{plan.reason}; drawn for {trial.share:.0%} of {trial.of}"
            self._replace(plan, trial.model, pb.ROUTE_STRATEGY_CANARY, reason)

    def _add_second(self, plan: Plan, cascade: CascadeRoute, state: RoutingState) -> None:
        """Let the answer escalate to the second model of the policy's cascade, if that has room."""
        if not state.fits(cascade.second):
            return
        plan.strategy, plan.cascade = pb.ROUTE_STRATEGY_CASCADE, cascade
        plan.reason = f"{plan.reason}; {cascade.second} where it is in doubt"
        head = policy_key(plan.policy), admin_pb2.ROUTER_HEAD_CASCADE
        plan.answer_predictor = self._heads.get(head)
        why = "answers where the first answer is in doubt"
        plan.move(self._models[cascade.second], why, last=True)

    def _make_room(self, plan: Plan, fits: Callable[[str], bool]) -> None:
        """Move a model that has room for the request to the front, as the chosen one has none."""
        others = [model.name for model in plan.candidates[1:]]
        for model in (*others, *self._spares):
            if fits(model):
                reason = f"the context of {plan.model} has no room for the request"
                plan.move(self._models[model], reason)
                plan.reason = f"{plan.reason}; {reason}"
                return

    def _keep_budget(
        self, plan: Plan, policy: RoutingPolicy, tenant: str, state: RoutingState
    ) -> None:
        """Let the budget's model answer if the tenant has spent the budget and the model has room.

        A caller who names a model gets the budget's model in any case, because they can name
        another one.
        """
        pinned = plan.strategy == pb.ROUTE_STRATEGY_PINNED
        for budget in policy.budgets:
            named = not budget.tenants or tenant in budget.tenants
            if not named or (pinned and self._is_cheap(plan.model, budget.model)):
                continue
            if state.spent(tenant) >= budget.per_hour:
                reason = f"{tenant} has spent its {budget.per_hour:g} of this hour"
                if pinned or state.fits(budget.model):
                    self._replace(plan, budget.model, pb.ROUTE_STRATEGY_BUDGET, reason)
                else:
                    reason += f", but the context of {budget.model} has no room for the request"
                # Also where its model would answer anyway: no canary or cascade may raise the cost.
                plan.strategy, plan.reason = pb.ROUTE_STRATEGY_BUDGET, reason
                return

    def _is_cheap(self, model: str, other: str) -> bool:
        """Return whether `model` costs no more than `other`."""
        settings, other_settings = self._models[model], self._models[other]
        return (
            settings.prompt_price <= other_settings.prompt_price
            and settings.answer_price <= other_settings.answer_price
        )

    def _replace(
        self, plan: Plan, model: str, strategy: pb.RouteStrategy.ValueType, reason: str
    ) -> None:
        """Let `model` answer in place of the chosen one."""
        if model != plan.model:
            plan.strategy, plan.reason = strategy, reason
            plan.move(self._models[model], reason)


def _chosen(
    policy: RoutingPolicy, features: Features
) -> tuple[str, pb.RouteStrategy.ValueType, str]:
    """Return the model that questions 1 to 4 name, which of them did, and why."""
    if features.governed is not None:
        model, rule_id = features.governed
        return model, pb.ROUTE_STRATEGY_SAFETY, f"the safety policy sends {rule_id} here"
    if features.model is not None:
        return features.model, pb.ROUTE_STRATEGY_PINNED, "the request names the model"
    for rule in policy.rules:
        if matches(rule, features):
            return rule.model, pb.ROUTE_STRATEGY_RULES, rule.reason
    if policy.learned is not None:
        return policy.learned.weak, pb.ROUTE_STRATEGY_LEARNED, ""
    return policy.default, pb.ROUTE_STRATEGY_RULES, "no rule matched: the default model"


def _spares(settings: RoutingSettings, models: Mapping[str, ModelSettings]) -> list[str]:
    """Return the models that may replace one without room for a request, in the order of choice.

    Models that routing names come first, then cheap ones. A model of another server only counts if
    routing names it: it may cost money, and prompts would leave the mesh.
    """
    named = {name for _, name in settings.all_models()}
    spares = [
        model
        for model in models.values()
        if model.answers and (model.name in named or model.server is None)
    ]
    spares.sort(
        key=lambda model: (model.name not in named, model.prompt_price + model.answer_price)
    )
    return [model.name for model in spares]


def matches(rule: RouteRule, features: Features) -> bool:
    """Return whether all conditions of `rule` hold; the cheap ones are checked first."""
    length = len(features.text)
    return (
        selects(rule, features)
        and (rule.max_prompt_chars is None or length <= rule.max_prompt_chars)
        and (rule.min_prompt_tokens is None or features.prompt_tokens >= rule.min_prompt_tokens)
        and (
            not rule.findings
            or any(fnmatch.filter(features.findings, pattern) for pattern in rule.findings)
        )
        and (rule.min_numbers is None or features.numbers >= rule.min_numbers)
        and (not rule.contains or _contains(rule.contains, features))
        and (not rule.languages or features.language in rule.languages)
        and (rule.code is None or features.has_code is rule.code)
    )


def _contains(patterns: tuple[str, ...], features: Features) -> bool:
    turn = features.text if features.last_turn is None else features.last_turn
    return compiled(patterns).search(turn[:SEARCH_CHARS]) is not None


@lru_cache(_PATTERNS_CACHED)
def compiled(patterns: tuple[str, ...]) -> Any:
    """Return one expression that finds any of `patterns`.

    Raises:
        ValueError: RE2 refuses it.
    """
    # RE2 reports the error; its own log line would repeat it.
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile("|".join(f"(?:{pattern})" for pattern in patterns), options)
    except re2.error as error:
        reason = error.args[0] if error.args else "refused"
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(text) from error


def check_patterns(settings: RoutingSettings) -> None:
    """Refuse rules with a pattern that cannot be used.

    Raises:
        SettingsError: a line for each, with its key and what is wrong with it.
    """
    problems = []
    for name, policy in {"": settings, **settings.policies}.items():
        for number, rule in enumerate(policy.rules):
            for index, pattern in enumerate(rule.contains):
                try:
                    compiled((pattern,))
                except ValueError as error:
                    where = f"{policy_key(name)}.rules.{number}.contains.{index}"
                    problems.append(f"{where}: {error}; write it in the syntax of RE2")
    if problems:
        raise SettingsError("\n".join(problems))


def selects(selection: RouteRule | Selection, features: Features) -> bool:
    """Return whether the selection, or rule, applies to the request's tenant and labels."""
    if selection.tenants and features.tenant not in selection.tenants:
        return False
    return all(features.labels.get(key) == value for key, value in selection.labels.items())


def drawn(trials: Iterable[Trial], model: str, key: str, salt: str = "") -> list[Trial]:
    """Return the canaries or shadows of `model` that take part in the request with `key`; draws are independent."""

    def uniform(trial: Trial) -> float:
        name = f"{salt}{trial.of} {trial.model} {key}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    return [trial for trial in trials if trial.of == model and uniform(trial) < trial.share]
