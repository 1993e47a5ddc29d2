"""The names of all rules, so that a policy that names another one is refused."""

from collections.abc import Iterator
from typing import Final

from gateway.safety.rules import default_rules
from gateway.safety.rules.encodings import ENCODINGS

HIDDEN: Final = "invisible"
"""How payloads of invisible characters are called: "injection.encoded.invisible"."""
LIST: Final = "list"
"""How the operator's lists are called: "deny.list"."""
DENY_LIST: Final = f"deny.{LIST}"

UNICODE: Final = (
    "annotation", "ansi", "bidi", "blank", "combining_flood", "control", "filler", "format", "full_width",
    "homoglyph", "invisible_only", "invisible_operator", "noncharacter", "soft_hyphen", "styled", "surrogate", "tag",
    "variation_selector", "zero_width",
)  # fmt: skip
"""What normalization takes out, replaces or, of homoglyphs, notices."""
LIMITS: Final = ("combining_marks", "encoded", "length", "repetition", "unbroken")

_FAMILIES: Final = ("pii", "secret", "injection", "deny")


def rule_names() -> frozenset[str]:
    """Every name that a finding in a prompt can have."""
    return frozenset(_names())


def _names() -> Iterator[str]:
    yield from (spec.id for spec in default_rules())
    yield from (f"unicode.{name}" for name in UNICODE)
    yield from (f"limit.{name}" for name in LIMITS)
    yield from ("syntax.chat_template", DENY_LIST, "injection.encoded.nested")
    encodings = (*(encoding.name for encoding in ENCODINGS), "rot13", HIDDEN)
    yield from (f"{family}.encoded.{name}" for family in _FAMILIES for name in encodings)
