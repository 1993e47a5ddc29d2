"""The built-in rules: the files of ``gateway/safety/data/rules``.

Their keys are the fields of `RuleSpec` and `Form`. ``(?&NAME)`` in a pattern stands for a fragment of the same file.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

import yaml

from gateway.safety.findings import Severity
from gateway.safety.rules.spec import Form, RuleSpec

_FILES: Final = ("pii.yaml", "secrets.yaml", "injection.yaml")
_FRAGMENT: Final = re.compile(r"\(\?&(\w+)\)")
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def default_rules() -> tuple[RuleSpec, ...]:
    """All default rules, in the order of the files."""
    return tuple(rule for name in _FILES for rule in _rules_in(name))


def _rules_in(name: str) -> Iterator[RuleSpec]:
    text = files("gateway.safety").joinpath("data/rules", name).read_text(encoding="utf-8")
    content = yaml.load(text, _LOADER)
    for rule in content["rules"]:
        forms = (_expanded(form, content["fragments"]) for form in rule["forms"])
        yield RuleSpec(
            id=rule["id"],
            forms=tuple(Form(**form) for form in forms),
            severity=Severity[rule["severity"].upper()],
            max_length=rule["max_length"],
            validator=rule.get("validator", ""),
            options=tuple(rule.get("options", ())),
            context=tuple(rule.get("context", ())),
        )


def _expanded(form: Mapping[str, Any], fragments: Mapping[str, str]) -> dict[str, Any]:
    return {
        key: _filled(value, fragments) if isinstance(value, str) else value
        for key, value in form.items()
    }


def _filled(pattern: str, fragments: Mapping[str, str]) -> str:
    """``pattern`` with its fragments, which may hold others."""
    while _FRAGMENT.search(pattern):
        pattern = _FRAGMENT.sub(lambda found: fragments[found[1]], pattern)
    return pattern
