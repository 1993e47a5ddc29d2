"""The rules that are there before an operator adds any."""

from collections.abc import Sequence

from gateway.safety.rules.defaults.injection import INJECTION_RULES
from gateway.safety.rules.defaults.pii import REGIONS, pii_rules
from gateway.safety.rules.defaults.secrets import SECRET_RULES
from gateway.safety.rules.spec import RuleSpec


def default_rules(regions: Sequence[str] = REGIONS) -> tuple[RuleSpec, ...]:
    """All default rules; ``regions`` as ISO 3166 codes for telephone numbers without a country code."""
    return (*pii_rules(regions), *SECRET_RULES, *INJECTION_RULES)


__all__ = ["INJECTION_RULES", "REGIONS", "SECRET_RULES", "default_rules", "pii_rules"]
