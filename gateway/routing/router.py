"""The seam of routing, and the router behind it.

A request goes through these questions; the first that has an answer names the model, the later ones may replace it:

1. Where does the safety policy send it? Such a request stays there.
2. Which model does the caller name?
3. Which rule of the policy holds? The policy is that of the first selection that takes tenant and labels.
4. What does the learned router say? Else the policy's default answers.
5. Has the tenant spent its budget, or is the wait too long? Then the model named for that answers.
6. Is the model's share of a canary drawn?
7. May the answer of this model go over to a second one (cascade, or speculative: both begin together)?
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from gateway.routing.cascade.watch import Judge
from gateway.routing.conditions import holds, selects
from gateway.routing.features import Features
from gateway.routing.plan import (
    BUDGET,
    CANARY,
    CASCADE,
    LEARNED,
    LOAD,
    PINNED,
    RULES,
    SAFETY,
    SPECULATIVE,
    Candidate,
    Learning,
    Plan,
)
from gateway.routing.scores import PROMPT, HeadId, Score, policy_key
from gateway.routing.trials import drawn
from sluice.settings.routing import LearnedRoute, RoutingPolicy, RoutingSettings

CHARS_PER_TOKEN: Final = 4


@dataclass(frozen=True)
class ModelFacts:
    """What routing knows about a model; prices are per million tokens."""

    tier: str
    prompt_price: float = 0.0
    answer_price: float = 0.0

    def cost(self, prompt_tokens: float, answer_tokens: float) -> float:
        """Of a request."""
        return (prompt_tokens * self.prompt_price + answer_tokens * self.answer_price) / 1e6


@dataclass(frozen=True)
class Prediction:
    """What a learned router says about one prompt.

    Attributes:
        strong: whether the strong model shall answer.
        gain: what the strong model is worth.
        quality_weak: predicted chance that the weak model's answer is right.
        quality_strong: the same of the strong model.
        reason: one sentence, with the score and the threshold.
    """

    strong: bool
    gain: float
    quality_weak: float
    quality_strong: float
    reason: str


class Predictor(Protocol):
    """A learned router with its target."""

    @property
    def version(self) -> str:
        """Names the artefact."""

    def predict(self, text: str) -> Prediction:
        """For the caller's turns."""


class Standing(Protocol):
    """What changes with time, as of now."""

    def wait_s(self, model: str) -> float:
        """Expected wait for a worker."""

    def spent(self, tenant: str) -> float:
        """In the last hour, in the currency of the prices."""


class Idle:
    """`Standing` where nothing waits and nothing is spent."""

    def wait_s(self, model: str) -> float:
        """See `Standing.wait_s`."""
        return 0.0

    def spent(self, tenant: str) -> float:
        """See `Standing.spent`."""
        return 0.0


class Router(Protocol):
    """Chooses the model."""

    @property
    def needs_prompt_tokens(self) -> bool:
        """Whether `Features.prompt_tokens` matters; counting them costs time."""

    @property
    def held_out(self) -> Mapping[HeadId, NDArray[np.float32]]:
        """The gains that each learned head predicted for the rows held out of its training."""

    def plan(self, features: Features, standing: Standing) -> Plan:
        """The plan for a request with ``features``. A pure function."""


class PolicyRouter:
    """`Router` by the section ``routing``.

    Args:
        models: by name.
        predictors: by the name of the policy that has a learned router; "" is the section itself.
        judges: by the name of the policy whose cascade has a learned part.
        version: of the section.
        held_out: see `Router.held_out`.
    """

    def __init__(
        self,
        settings: RoutingSettings,
        models: Mapping[str, ModelFacts],
        predictors: Mapping[str, Predictor],
        judges: Mapping[str, Judge],
        version: str = "",
        held_out: Mapping[HeadId, NDArray[np.float32]] | None = None,
    ) -> None:
        self.held_out = held_out or {}
        self._settings = settings
        self._models = models
        self._predictors = predictors
        self._judges = judges
        self._version = version

    @property
    def needs_prompt_tokens(self) -> bool:
        """See `Router.needs_prompt_tokens`."""
        policies = (self._settings, *self._settings.policies.values())
        return any(rule.min_prompt_tokens is not None for one in policies for rule in one.rules)

    def plan(self, features: Features, standing: Standing) -> Plan:
        """See `Router.plan`."""
        name, policy = self._policy(features)
        plan = self._chosen(name, policy, features)
        if plan.strategy not in (SAFETY, PINNED):
            plan = self._relieved(plan, policy, features, standing)
            plan = self._tried(plan, policy, features)
            plan = self._cascading(plan, name, policy)
        candidates = tuple(self._priced(plan.candidates, features, standing))
        versions = {"routing": self._version, **plan.versions}
        learning = self._learning(name, policy, features) if plan.strategy != SAFETY else None
        return replace(plan, candidates=candidates, versions=versions, learning=learning)

    def _policy(self, features: Features) -> tuple[str, RoutingPolicy]:
        for selection in self._settings.select:
            if selects(selection, features):
                return selection.policy, self._settings.policies[selection.policy]
        return "", self._settings

    def _chosen(self, name: str, policy: RoutingPolicy, features: Features) -> Plan:
        if features.governed is not None:
            reason = f"the safety policy sends {features.governed.rule} here"
            return self._plan(features.governed.model, SAFETY, reason)
        if features.model is not None:
            return self._plan(features.model, PINNED, "the request names the model")
        for rule in policy.rules:
            if holds(rule, features):
                return self._plan(rule.model, RULES, rule.reason)
        if policy.learned is not None:
            return self._predicted(name, policy.learned, features)
        return self._plan(policy.default, RULES, "no rule applies: the default model")

    def _predicted(self, name: str, learned: LearnedRoute, features: Features) -> Plan:
        predictor = self._predictors[name]
        found = predictor.predict(features.text)
        weak = self._candidate(learned.weak, found.reason, found.quality_weak)
        strong = self._candidate(learned.strong, found.reason, found.quality_strong)
        first, second = (strong, weak) if found.strong else (weak, strong)
        by = HeadId(policy_key(name), predictor.version, PROMPT)
        chances = {learned.weak: found.quality_weak, learned.strong: found.quality_strong}
        return Plan(
            first.model,
            first.tier,
            LEARNED,
            found.reason,
            candidates=(first, second),
            versions={"router": predictor.version},
            scores=(Score(by, found.gain, chances),),
        )

    def _relieved(
        self, plan: Plan, policy: RoutingPolicy, features: Features, standing: Standing
    ) -> Plan:
        """A cheaper or quicker model where budget or wait ask for it."""
        for budget in policy.budgets:
            named = not budget.tenants or features.tenant in budget.tenants
            if named and standing.spent(features.tenant) >= budget.per_hour:
                reason = f"{features.tenant} has spent its {budget.per_hour:g} of this hour"
                # Also where its model would answer anyhow: nothing may follow that costs more.
                relieved = self._instead(plan, budget.model, BUDGET, reason)
                return replace(relieved, strategy=BUDGET, reason=reason)
        load = policy.load
        if load is not None and (wait_s := standing.wait_s(plan.model)) > load.max_wait_s:
            reason = f"{plan.model} would wait {wait_s:.1f} s, more than {load.max_wait_s:g} s"
            return self._instead(plan, load.model, LOAD, reason)
        return plan

    def _tried(self, plan: Plan, policy: RoutingPolicy, features: Features) -> Plan:
        for trial in drawn(policy.canaries, plan.model, features.key):
            reason = f"{plan.reason}; drawn for {trial.share:.0%} of {trial.of}"
            return self._instead(plan, trial.model, CANARY, reason)
        return plan

    def _cascading(self, plan: Plan, name: str, policy: RoutingPolicy) -> Plan:
        cascade = policy.cascade
        if cascade is None or plan.model != cascade.first or plan.strategy == BUDGET:
            return plan
        second = self._candidate(cascade.second, "answers where the first answer is in doubt")
        others = tuple(one for one in plan.candidates if one.model != second.model)
        known = next((one for one in plan.candidates if one.model == second.model), second)
        candidates = (*others, replace(known, reason=second.reason))
        together = cascade.start == "together"
        begins = ", and begins together with it" if together else ""
        reason = f"{plan.reason}; {cascade.second} where it is in doubt{begins}"
        return replace(
            plan,
            strategy=SPECULATIVE if together else CASCADE,
            reason=reason,
            cascade=cascade,
            judge=self._judges.get(name),
            candidates=candidates,
        )

    def _learning(self, name: str, policy: RoutingPolicy, features: Features) -> Learning:
        outcomes = self._settings.outcomes
        pair, kept = policy.pair or outcomes.pair, features.tenant in outcomes.tenants
        return Learning(name, pair, policy.shadows, kept)

    def _instead(self, plan: Plan, model: str, strategy: str, reason: str) -> Plan:
        if model == plan.model:
            return plan
        first = next((one for one in plan.candidates if one.model == model), None)
        first = replace(first, reason=reason) if first else self._candidate(model, reason)
        others = tuple(one for one in plan.candidates if one.model != model)
        return replace(
            plan,
            model=model,
            tier=first.tier,
            strategy=strategy,
            reason=reason,
            candidates=(first, *others),
        )

    def _plan(self, model: str, strategy: str, reason: str) -> Plan:
        candidate = self._candidate(model, reason)
        return Plan(model, candidate.tier, strategy, reason, candidates=(candidate,))

    def _candidate(self, model: str, reason: str, quality: float | None = None) -> Candidate:
        return Candidate(model, self._models[model].tier, reason, quality)

    def _priced(
        self, candidates: tuple[Candidate, ...], features: Features, standing: Standing
    ) -> Iterator[Candidate]:
        # Before the model is known its tokens are not: four characters a token is the usual estimate.
        prompt_tokens = features.prompt_tokens or len(features.text) / CHARS_PER_TOKEN
        for one in candidates:
            cost = self._models[one.model].cost(prompt_tokens, features.answer_tokens)
            yield replace(one, cost=cost, wait_s=standing.wait_s(one.model))
