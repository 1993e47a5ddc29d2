"""The seam of routing, and the router behind it: a named model as it is, "auto" by the rules of the configuration.

Where the safety policy sends a request goes before both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.routing.features import Features
from sluice.settings import RouteRule, RoutingSettings

PINNED: Final = "pinned"
RULES: Final = "rules"
SAFETY: Final = "safety"


@dataclass(frozen=True)
class Plan:
    """Which model answers, and why."""

    model: str
    tier: str
    strategy: str
    """Who decided: "safety", "pinned" or "rules"."""
    reason: str
    """One sentence for people."""
    degraded: bool = False
    """Whether the model is smaller than the chosen one, which could not have answered in time."""


class Router(Protocol):
    """Chooses the model."""

    @property
    def needs_prompt_tokens(self) -> bool:
        """Whether `Features.prompt_tokens` matters; counting them costs time."""

    def plan(self, features: Features) -> Plan:
        """The model for a request with ``features``. A pure function."""


class RuleRouter:
    """`Router` by ``settings.routing``: the first rule that holds, else the default."""

    def __init__(self, settings: RoutingSettings, tiers: Mapping[str, str]) -> None:
        self._settings = settings
        self._tiers = tiers

    @property
    def needs_prompt_tokens(self) -> bool:
        """See `Router.needs_prompt_tokens`."""
        return any(rule.min_prompt_tokens is not None for rule in self._settings.rules)

    def plan(self, features: Features) -> Plan:
        """See `Router.plan`."""
        if features.governed is not None:
            reason = f"the safety policy sends {features.governed.rule} here"
            return self._plan(features.governed.model, SAFETY, reason)
        if features.model is not None:
            return self._plan(features.model, PINNED, "the request names the model")
        for rule in self._settings.rules:
            if _holds(rule, features):
                return self._plan(rule.model, RULES, rule.reason)
        return self._plan(self._settings.default, RULES, "no rule applies: the default model")

    def _plan(self, model: str, strategy: str, reason: str) -> Plan:
        return Plan(model, self._tiers[model], strategy, reason)


def _holds(rule: RouteRule, features: Features) -> bool:
    if rule.min_numbers is not None and features.numbers < rule.min_numbers:
        return False
    if rule.min_prompt_tokens is not None and features.prompt_tokens < rule.min_prompt_tokens:
        return False
    return all(features.labels.get(key) == value for key, value in rule.labels.items())
