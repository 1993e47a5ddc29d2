"""Which rules, selections and trials of the configuration apply to a request."""

import fnmatch
import hashlib
from collections.abc import Iterable
from typing import Final

from gateway.routing.features import Features
from sluice.settings.routing import RouteRule, Selection, Trial

SHADOW: Final = "shadow "
"""Salt of draws for shadows, so that they are unrelated to those for canaries."""


def matches(rule: RouteRule, features: Features) -> bool:
    """Whether every condition that is set holds; the cheap ones are checked first."""
    length = len(features.text)
    return (
        selects(rule, features)
        and (rule.min_prompt_chars is None or length >= rule.min_prompt_chars)
        and (rule.max_prompt_chars is None or length <= rule.max_prompt_chars)
        and (rule.min_prompt_tokens is None or features.prompt_tokens >= rule.min_prompt_tokens)
        and (
            not rule.findings
            or any(fnmatch.filter(features.findings, one) for one in rule.findings)
        )
        and (rule.min_numbers is None or features.numbers >= rule.min_numbers)
        and (not rule.languages or features.language in rule.languages)
        and (rule.code is None or features.has_code is rule.code)
    )


def selects(selection: RouteRule | Selection, features: Features) -> bool:
    """Whether the selection, or rule, applies to the request's tenant and labels."""
    if selection.tenants and features.tenant not in selection.tenants:
        return False
    return all(features.labels.get(key) == value for key, value in selection.labels.items())


def drawn(trials: Iterable[Trial], model: str, key: str, salt: str = "") -> list[Trial]:
    """The canaries or shadows of ``model`` that the request named ``key`` takes part in; each share is drawn apart."""

    def uniform(trial: Trial) -> float:
        name = f"{salt}{trial.of} {trial.model} {key}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    return [one for one in trials if one.of == model and uniform(one) < one.share]
