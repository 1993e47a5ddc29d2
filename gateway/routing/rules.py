"""Which rules, selections and trials of the configuration apply to a request."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from gateway.routing.features import Features
from sluice.settings.routing import RouteRule, Selection, Trial

SHADOW: Final = "shadow "
"""Salt of draws for shadows, so that they are unrelated to those for canaries."""


def matches(rule: RouteRule, features: Features) -> bool:
    """Whether every condition that is set holds; the cheap ones are checked first."""
    length = len(features.text)
    return (
        _among(features.tenant, rule.tenants)
        and _labelled(features.labels, rule.labels)
        and (rule.min_prompt_chars is None or length >= rule.min_prompt_chars)
        and (rule.max_prompt_chars is None or length <= rule.max_prompt_chars)
        and (rule.min_prompt_tokens is None or features.prompt_tokens >= rule.min_prompt_tokens)
        and (not rule.findings or _found(features.findings, rule.findings))
        and (rule.min_numbers is None or features.numbers >= rule.min_numbers)
        and (not rule.languages or features.language in rule.languages)
        and (rule.code is None or features.has_code is rule.code)
    )


def selects(selection: Selection, features: Features) -> bool:
    """Whether the selection applies to the request's tenant and labels."""
    return _among(features.tenant, selection.tenants) and _labelled(
        features.labels, selection.labels
    )


def drawn(trials: Iterable[Trial], model: str, key: str, salt: str = "") -> list[Trial]:
    """The canaries or shadows of ``model`` that the request named ``key`` takes part in; each share is drawn apart."""
    of_model = (trial for trial in trials if trial.of == model)
    return [trial for trial in of_model if _uniform(trial, key, salt) < trial.share]


def _among(name: str, names: Collection[str]) -> bool:
    return not names or name in names


def _labelled(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def _found(findings: Collection[str], patterns: Collection[str]) -> bool:
    return any(_fits(rule, pattern) for pattern in patterns for rule in findings)


def _fits(rule: str, pattern: str) -> bool:
    return rule.startswith(pattern[:-1]) if pattern.endswith("*") else rule == pattern


def _uniform(trial: Trial, key: str, salt: str) -> float:
    """In [0, 1), uniform over keys and independent between trials."""
    name = f"{salt}{trial.of} {trial.model} {key}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
