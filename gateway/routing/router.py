"""Resolves which model answers a request, by the section ``routing`` of the configuration.

These questions are asked in order; the first with an answer names the model, the later ones may replace it:

1. Does the safety policy send it to a governed model? Then nothing below applies.
2. Does the caller name a model?
3. Which rule of the policy matches? The policy is that of the first selection that matches tenant and labels.
4. What does the learned router predict? Without one the policy's default answers.
5. Has the tenant spent its budget? Then the model named for that answers, also where the caller names a dearer one. Is
   the wait too long? Then the model named for that answers.
6. Is the request drawn for a canary of the model?
7. May the answer escalate to a second model (cascade)?

A model whose context has no room for the request is passed over in questions 3 to 7, for the next one that has.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.features import Features
from gateway.routing.plan import Plan
from gateway.routing.prediction import HeadKey, LearnedHead, policy_key
from gateway.routing.rules import drawn, matches, selects
from sluice.settings.models import ModelSettings
from sluice.settings.routing import LearnedRoute, RoutingPolicy, RoutingSettings
from sluice.v1.admin_pb2 import (
    ROUTER_HEAD_CASCADE,
    ROUTER_HEAD_PROMPT,
    RouteCandidate,
    RouteRecord,
)
from sluice.v1.inference_pb2 import (
    ROUTE_STRATEGY_BUDGET,
    ROUTE_STRATEGY_CANARY,
    ROUTE_STRATEGY_CASCADE,
    ROUTE_STRATEGY_LEARNED,
    ROUTE_STRATEGY_LOAD,
    ROUTE_STRATEGY_PINNED,
    ROUTE_STRATEGY_RULES,
    ROUTE_STRATEGY_SAFETY,
    RouteStrategy,
)
from sluice.wire.clock import set_duration

CHARS_PER_TOKEN: Final = 4


def _nothing(_: str) -> float:
    return 0.0


def _none(_: str) -> None:
    return None


def _always(_: str) -> bool:
    return True


class Router:
    """Chooses the model by the section ``routing``.

    Args:
        models: by name.
        heads: the learned ones that its policies name.
        version: of the section.

    Attributes:
        needs_prompt_tokens: whether `Features.prompt_tokens` matters; counting them costs time.
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
        rules = [rule for one in policies for rule in one.rules]
        self.needs_prompt_tokens = any(rule.min_prompt_tokens is not None for rule in rules)

    @property
    def versions(self) -> list[str]:
        """Of the section, and of the learned routers in use."""
        return [self._version, *sorted(map(str, self.held_out))]

    @property
    def held_out(self) -> dict[HeadKey, NDArray[np.float32]]:
        """The gains that each learned head predicted for the rows held out of its training."""
        return {head.by: head.gains for head in self._heads.values()}

    def plan(
        self,
        features: Features,
        wait_s: Callable[[str], float] = _nothing,
        spent: Callable[[str], float] = _nothing,
        soft_limit: Callable[[str], tuple[str, str] | None] = _none,
        fits: Callable[[str], bool] = _always,
    ) -> Plan:
        """The plan for a request with ``features``. A pure function.

        Args:
            wait_s: the expected wait for a worker of a model.
            spent: what a tenant has spent in the last hour, in the currency of the prices.
            soft_limit: the model that answers instead of others while a tenant is near a limit, and why.
            fits: whether the context of a model may have room for the request. Where none has, the plan is made as if
                all had.
        """
        select, policies = self._settings.select, self._settings.policies
        name = next((one.policy for one in select if selects(one, features)), "")
        policy = policies.get(name, self._settings)
        plan = self._chosen(name, policy, features)
        route, governed = plan.route, features.governed is not None
        if not governed and not features.resumed:
            pinned = route.strategy == ROUTE_STRATEGY_PINNED
            if not pinned:
                self._make_room(plan, fits)
            soft = None if pinned else soft_limit(features.tenant)
            if soft is not None and fits(soft[0]) and not self._is_cheap(plan.model, soft[0]):
                self._replace(plan, soft[0], ROUTE_STRATEGY_BUDGET, soft[1])
            else:
                self._keep_budget(plan, policy, features.tenant, spent, fits)
        if not governed and route.strategy not in (ROUTE_STRATEGY_PINNED, ROUTE_STRATEGY_BUDGET):
            load, cascade = policy.load, policy.cascade
            late_s = wait_s(plan.model) if load is not None and fits(load.model) else 0.0
            if load is not None and late_s > load.max_wait_s:
                reason = f"{plan.model} would wait {late_s:.1f} s, more than {load.max_wait_s:g} s"
                self._replace(plan, load.model, ROUTE_STRATEGY_LOAD, reason)
            for trial in drawn(policy.canaries, plan.model, features.key)[:1]:
                if not fits(trial.model):
                    continue
                reason = f"{route.reason}; drawn for {trial.share:.0%} of {trial.of}"
                self._replace(plan, trial.model, ROUTE_STRATEGY_CANARY, reason)
            if cascade is not None and plan.model == cascade.first and fits(cascade.second):
                route.strategy, plan.cascade = ROUTE_STRATEGY_CASCADE, cascade
                route.reason = f"{route.reason}; {cascade.second} where it is in doubt"
                plan.answer_predictor = self._heads.get((policy_key(name), ROUTER_HEAD_CASCADE))
                second, why = cascade.second, "answers where the first answer is in doubt"
                plan.move(second, self._models[second].tier, why, last=True)
        # Before the model is known its tokens are not: four characters a token is the usual estimate.
        prompt_tokens = features.prompt_tokens or len(features.text) / CHARS_PER_TOKEN
        for one in route.candidates:
            one.cost = self._models[one.model].cost(prompt_tokens, features.answer_tokens)
            set_duration(one.expected_wait, wait_s(one.model) * 1e3)
        route.versions["routing"] = self._version
        plan.policy = name
        return plan

    def _chosen(self, name: str, policy: RoutingPolicy, features: Features) -> Plan:
        if features.governed is not None:
            model, found = features.governed
            return self._plan(model, ROUTE_STRATEGY_SAFETY, f"the safety policy sends {found} here")
        if features.model is not None:
            reason = "the request names the model"
            return self._plan(features.model, ROUTE_STRATEGY_PINNED, reason)
        for rule in policy.rules:
            if matches(rule, features):
                return self._plan(rule.model, ROUTE_STRATEGY_RULES, rule.reason)
        if policy.learned is not None:
            return self._predicted(name, policy.learned, features)
        reason = "no rule matched: the default model"
        return self._plan(policy.default, ROUTE_STRATEGY_RULES, reason)

    def _predicted(self, name: str, learned: LearnedRoute, features: Features) -> Plan:
        found = self._heads[policy_key(name), ROUTER_HEAD_PROMPT].predict(features.text)
        first, second = learned.weak, learned.strong
        if found.strong:
            first, second = second, first
        plan = self._plan(first, ROUTE_STRATEGY_LEARNED, found.reason)
        plan.move(second, self._models[second].tier, found.reason, last=True)
        for one in plan.route.candidates:
            one.quality = found.score.chances[one.model]
        plan.route.versions["router"] = found.score.version
        plan.route.scores.append(found.score)
        return plan

    def _make_room(self, plan: Plan, fits: Callable[[str], bool]) -> None:
        """Put a model that has room for the request first, where the chosen one has not."""
        if fits(plan.model):
            return
        others = [one.model for one in plan.route.candidates[1:]]
        for model in (*others, *self._spares):
            if fits(model):
                reason = f"the context of {plan.model} has no room for the request"
                plan.move(model, self._models[model].tier, reason)
                plan.route.reason = f"{plan.route.reason}; {reason}"
                return

    def _keep_budget(
        self,
        plan: Plan,
        policy: RoutingPolicy,
        tenant: str,
        spent: Callable[[str], float],
        fits: Callable[[str], bool],
    ) -> None:
        """The model of the budget answers where the tenant's is spent, if it has room for the request.

        A named model is left for it in any case: whoever names one may name another.
        """
        pinned = plan.route.strategy == ROUTE_STRATEGY_PINNED
        for budget in policy.budgets:
            named = not budget.tenants or tenant in budget.tenants
            if not named or (pinned and self._is_cheap(plan.model, budget.model)):
                continue
            if spent(tenant) >= budget.per_hour:
                reason = f"{tenant} has spent its {budget.per_hour:g} of this hour"
                if pinned or fits(budget.model):
                    self._replace(plan, budget.model, ROUTE_STRATEGY_BUDGET, reason)
                else:
                    reason += f", but the context of {budget.model} has no room for the request"
                # Also where its model would answer anyway: no canary or cascade may raise the cost.
                plan.route.strategy, plan.route.reason = ROUTE_STRATEGY_BUDGET, reason
                return

    def _is_cheap(self, model: str, other: str) -> bool:
        """Whether ``model`` costs no more than ``other``."""
        one, two = self._models[model], self._models[other]
        return one.prompt_price <= two.prompt_price and one.answer_price <= two.answer_price

    def _replace(
        self, plan: Plan, model: str, strategy: RouteStrategy.ValueType, reason: str
    ) -> None:
        """``model`` answers in place of another one."""
        if model != plan.model:
            plan.route.strategy, plan.route.reason = strategy, reason
            plan.move(model, self._models[model].tier, reason)

    def _plan(self, model: str, strategy: RouteStrategy.ValueType, reason: str) -> Plan:
        first = RouteCandidate(model=model, tier=self._models[model].tier, reason=reason)
        return Plan(RouteRecord(strategy=strategy, reason=reason, candidates=(first,)))


def _spares(settings: RoutingSettings, models: Mapping[str, ModelSettings]) -> list[str]:
    """Return the models that may answer where the chosen one has no room for a request, in the order of choice.

    Those that routing names come first, then cheap ones. A model of another server answers only where routing names it:
    it may cost money, and prompts would leave the mesh.
    """
    named = {name for _, name in settings.all_models()}
    found = [
        one for one in models.values() if one.answers and (one.name in named or one.server is None)
    ]
    found.sort(key=lambda one: (one.name not in named, one.prompt_price + one.answer_price))
    return [one.name for one in found]
