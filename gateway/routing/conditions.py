"""Whether a rule or a selection of the configuration holds for a request."""

from collections.abc import Collection, Mapping

from gateway.routing.features import Features
from sluice.settings.routing import RouteRule, Selection


def holds(rule: RouteRule, features: Features) -> bool:
    """Whether every condition that is set holds; the cheap ones are looked at first."""
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
    """Whether the selection takes the request."""
    return _among(features.tenant, selection.tenants) and _labelled(
        features.labels, selection.labels
    )


def _among(name: str, names: Collection[str]) -> bool:
    return not names or name in names


def _labelled(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def _found(findings: Collection[str], patterns: Collection[str]) -> bool:
    return any(_fits(rule, pattern) for pattern in patterns for rule in findings)


def _fits(rule: str, pattern: str) -> bool:
    return rule.startswith(pattern[:-1]) if pattern.endswith("*") else rule == pattern
