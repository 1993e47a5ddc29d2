"""The default rules as the filter has them, and texts that hold what they find."""

from collections.abc import Sequence
from functools import cache

from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import RuleSpec, default_rules
from tests.gateway.safety.rules.samples import FOUND, IN_CONTEXT, NOT_FOUND

SAMPLES = (
    *FOUND.values(),
    *NOT_FOUND,
    *(frame.format(value) for frame, value in IN_CONTEXT.values()),
    *(value for _, value in IN_CONTEXT.values()),
    *(frame.format("") for frame, _ in IN_CONTEXT.values()),
)


@cache
def default() -> tuple[Sequence[RuleSpec], RuleSet]:
    """The default rules that go by patterns, all watched."""
    specs = [spec for spec in default_rules() if not spec.scored]
    scanner = RuleSet(specs, is_prompt=False)
    return specs, scanner
