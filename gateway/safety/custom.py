"""Custom rules: builds rules from the operator's configuration and checks their examples."""

from collections.abc import Iterator
from typing import Final

from gateway.safety.findings import Severity
from gateway.safety.output.automaton import Automaton, watched_rules
from gateway.safety.patterns import PatternError, width_of
from gateway.safety.rules.limits import TextLimits
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import Form, RuleError, RuleSpec
from gateway.safety.settings import RuleSettings
from gateway.safety.text.normalize import normalize

MATCH_CHARS_MAX: Final = 2000
"""The longest match of an operator's rule: the filter of answers may hold back as much."""

Problem = tuple[tuple[str | int, ...], str]
"""A key of a rule, and what is wrong with its value."""


def custom_rule(rule: RuleSettings) -> RuleSpec:
    """``rule`` for prompts and answers.

    Raises:
        PatternError: the pattern is not accepted.
    """
    most = width_of(rule.pattern).most
    if most > MATCH_CHARS_MAX:
        raise PatternError(f"matches of up to {most} characters; at most {MATCH_CHARS_MAX}")
    severity = Severity[rule.severity.upper()]
    form = Form(rule.pattern)
    return RuleSpec(rule.id, (form,), severity, most, rule.validator, context_chars=0)


def problems_of(rule: RuleSettings) -> Iterator[Problem]:
    """Problems of ``rule``: patterns that an engine refuses, examples with another result than stated."""
    try:
        spec = custom_rule(rule)
        scanner = RuleSet([spec], limits=TextLimits(0, 0, 0, stacked_marks=False), decode=False)
        Automaton(watched_rules([spec]))
    except PatternError as error:
        yield ("pattern",), str(error)
        return
    except RuleError as error:
        yield ("pattern",), error.reason
        return
    for key, examples, expected in (
        ("must_match", rule.must_match, True),
        ("must_not_match", rule.must_not_match, False),
    ):
        for index, example in enumerate(examples):
            if bool(scanner.scan(normalize(example).text)) is not expected:
                said = "does not match" if expected else "matches"
                yield (key, index), f"{said}: {example!r}"
