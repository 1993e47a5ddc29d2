"""What an inspection looks for. Pure functions: rules and a text in, findings out.

A text goes once through one automaton of all patterns (`prefilter`), which says what occurs; only for that RE2 says
where (`forms`), and a validator per candidate whether it is one (`validators`). Then come the operator's lists
(`lexicon`), what hides in an encoding (`payloads`), how signs of an injection add up (`scoring`), the limits, and
which of overlapping findings stand (`overlaps`). Everything is linear in the text; `work` counts it.
"""

from gateway.safety.rules.defaults import REGIONS, default_rules
from gateway.safety.rules.lexicon import ListKind, PhraseList
from gateway.safety.rules.limits import Limits
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import Form, RuleError, RuleSpec
from gateway.safety.rules.work import Work

__all__ = [
    "REGIONS",
    "Form",
    "Limits",
    "ListKind",
    "PhraseList",
    "RuleError",
    "RuleSet",
    "RuleSpec",
    "Work",
    "default_rules",
]
