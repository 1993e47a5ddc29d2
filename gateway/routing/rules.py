"""Decides which rules, selections and trials of the configuration apply to a request."""

import fnmatch
import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import re2

from gateway.routing.features import Features
from sluice.errors import SettingsError
from sluice.settings.routing import RouteRule, RoutingSettings, Selection, Trial

SHADOW: Final = "shadow "
"""Salt of the draws for shadows, so that they are independent of those for canaries."""
SEARCH_CHARS: Final = 16_384
"""Length of a turn that `contains` searches, from its beginning, in characters. It bounds the time on
the event loop.
"""
_PATTERNS_CACHED: Final = 1024
"""Sets of patterns that stay compiled."""


def matches(rule: RouteRule, features: Features) -> bool:
    """Return whether all conditions of `rule` hold; the cheap ones are checked first."""
    length = len(features.text)
    return (
        selects(rule, features)
        and (rule.min_prompt_chars is None or length >= rule.min_prompt_chars)
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
    policies = {
        "routing": settings,
        **{f"routing.policies.{name}": policy for name, policy in settings.policies.items()},
    }
    for key, policy in policies.items():
        for number, rule in enumerate(policy.rules):
            for index, pattern in enumerate(rule.contains):
                where = f"{key}.rules.{number}.contains.{index}"
                try:
                    compiled((pattern,))
                except ValueError as error:
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
