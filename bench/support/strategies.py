"""Routing strategies between the two shipped tiers, by name, and a mesh that serves them all.

Each is a policy of the configuration that requests ask for by a label, so that runs of all of them can be interleaved
on the same processes. A further strategy is one more entry of `strategies`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluice import settings as config
from sluice.settings.routing import (
    CascadeRoute,
    LearnedRoute,
    RoutingPolicy,
    RoutingSettings,
    Selection,
    Target,
)

WEAK: Final = "small"
STRONG: Final = "large"
LABEL: Final = "strategy"
PRICES: Final = {WEAK: 0.16, STRONG: 1.0}
"""Per million tokens, of prompts as of answers, in the ratio of the parameters."""
COMMIT_TOKENS: Final = 64
"""The small tier's answers end before, so that they are checked whole."""


@dataclass(frozen=True)
class Strategy:
    """How "auto" is resolved, and what the caller says to it."""

    policy: RoutingPolicy
    accept_replace: bool = False


def strategies(router: Path) -> dict[str, Strategy]:
    """All of them; ``router`` is an artefact of `sluice router train --cascade`."""
    shipped = config.Settings().routing.model_dump(include=set(RoutingPolicy.model_fields))
    return {
        WEAK: Strategy(RoutingPolicy(default=WEAK)),
        STRONG: Strategy(RoutingPolicy(default=STRONG)),
        "rules": Strategy(RoutingPolicy.model_validate(shipped)),
        "learned-quality": Strategy(RoutingPolicy(learned=_learned(router, quality=1.0))),
        "learned-share": Strategy(RoutingPolicy(learned=_learned(router, strong_share=0.3))),
        "cascade-judged": Strategy(RoutingPolicy(cascade=_cascade(router))),
        "cascade-replace": Strategy(RoutingPolicy(cascade=_cascade(router, mode="replace")), True),
        "learned-cascade": Strategy(
            RoutingPolicy(learned=_learned(router, quality=0.9), cascade=_cascade(router))
        ),
    }


def mesh_settings(named: Mapping[str, Strategy]) -> config.Settings:
    """A mesh of both tiers with ``named``, each for requests with its label.

    Without prefix caches: all strategies ask the same questions, and whoever comes first would pay for the others.
    """
    policies = {name: strategy.policy for name, strategy in named.items()}
    select = tuple(Selection(policy=name, labels={LABEL: name}) for name in named)
    return config.Settings(
        models=tuple(_tier(name, price) for name, price in PRICES.items()),
        routing=RoutingSettings(default=WEAK, policies=policies, select=select),
        gateway=config.GatewaySettings(address="127.0.0.1:0"),
    )


def _tier(name: str, price: float) -> config.ModelSettings:
    return config.ModelSettings(
        name=name,
        tier=name,
        path=f"builtin:{name}",
        prefix_cache=False,
        prompt_price=price,
        answer_price=price,
    )


def _learned(router: Path, **target: float) -> LearnedRoute:
    return LearnedRoute(
        artefact=str(router), weak=WEAK, strong=STRONG, target=Target.model_validate(target)
    )


def _cascade(router: Path, **fields: Any) -> CascadeRoute:
    values = {
        "first": WEAK,
        "second": STRONG,
        "commit_tokens": COMMIT_TOKENS,
        "artefact": str(router),
        "target": Target(quality=1.0),
        "checks": ("finished", "json"),
        **fields,
    }
    return CascadeRoute.model_validate(values)
