"""Rule definitions as plain data, the view of a match that validators get, and the built-in rules.

The built-in rules are the files of `gateway/safety/data/rules`. Their keys are the fields of
`RuleSpec` and `Form`; `(?&NAME)` in a pattern stands for a fragment of the same file.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import yaml

from gateway.safety.findings import Severity

LOOKBEHIND: Final = 32
"""How far before a match a validator looks, in characters. Context words come on top."""
LOOKAHEAD: Final = 8
"""How far behind a match a validator looks, in characters: a stream holds as much back behind every
match.
"""
UNBOUNDED: Final = sys.maxsize
"""Stands for a length or an offset without an upper bound."""


@dataclass(frozen=True, slots=True)
class Form:
    """One pattern of a rule."""

    pattern: str
    """Linear-time syntax, see `gateway.safety.patterns`; repeats are bounded unless `max_length` is UNBOUNDED."""
    in_context: bool = False
    """Whether it counts only behind one of the rule's context words."""
    weight: int = 0
    """Strength as an indicator, see `gateway.safety.rules.indicators`; 0: the rule is not scored."""
    hint: str = ""
    """A cheaper pattern that matches inside every match of `pattern`; empty: the pattern itself."""
    head: str = ""
    """Required beginning of `pattern` that belongs to no finding, so that a stream need not wait for
    it.
    """
    stream: str = ""
    """Pattern that a stream follows instead, for a validator that reads on behind the match; without a
    head.
    """


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """One rule, before it is compiled."""

    id: str
    forms: tuple[Form, ...]
    severity: Severity
    max_length: int
    """Longest finding, in characters; a validator that reads on behind a match stops there. Nothing cuts
    other matches, so no pattern may match more.
    """
    validator: str = ""
    """A name of `gateway.safety.rules.validators.VALIDATORS`; empty: the pattern decides alone."""
    options: tuple[str, ...] = ()
    """Options of the validator, such as regions."""
    context: tuple[str, ...] = ()
    """Words that make a form in context count. They match at the start of a word, in any case."""
    context_chars: int = 48
    """Farthest start of a context word before the match, in characters."""
    lookbehind: int = LOOKBEHIND
    """Characters before a match and its context words that decide about it."""
    lookahead: int = LOOKAHEAD
    """Characters behind a match that decide about it."""

    @property
    def scored(self) -> bool:
        """Whether the severity follows from the weights of the findings nearby."""
        return any(form.weight for form in self.forms)


Span = tuple[int, int]
"""Start and end, in characters."""


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A match of a pattern, with the text around it.

    A validator may look `LOOKBEHIND` characters back and `LOOKAHEAD` ahead, and further only through `run`, which is
    bounded by the rule's `max_length`.
    """

    text: str
    start: int
    end: int
    spec: RuleSpec

    @property
    def value(self) -> str:
        """Text that matched."""
        return self.text[self.start : self.end]

    def before(self, chars: int) -> str:
        """Return at most `chars` characters before the match."""
        assert chars <= LOOKBEHIND, "a stream keeps no more"
        return self.text[max(0, self.start - chars) : self.start]

    def after(self, chars: int) -> str:
        """Return at most `chars` characters behind the match."""
        assert chars <= LOOKAHEAD, "a stream waits for no more"
        return self.text[self.end : self.end + chars]

    def run(self, pattern: re.Pattern[str], start: int) -> int:
        """Return the end of what `pattern` matches at `start`, at most `max_length` behind the match's start."""
        limit = min(len(self.text), self.start + self.spec.max_length)
        match = pattern.match(self.text, start, limit)
        return match.end() if match else start


Validator = Callable[[RuleMatch], Span | bool | None]
"""Returns whether the match is a finding, or the place of the finding, which may be smaller or larger.
A pure function.
"""


_FILES: Final = ("pii.yaml", "secrets.yaml", "injection.yaml")
_FRAGMENT: Final = re.compile(r"\(\?&(\w+)\)")
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def default_rules() -> tuple[RuleSpec, ...]:
    """Return all default rules, in the order of the files."""
    return tuple(rule for name in _FILES for rule in _rules_in(name))


def _rules_in(name: str) -> Iterator[RuleSpec]:
    text = files("gateway.safety").joinpath("data/rules", name).read_text(encoding="utf-8")
    content = yaml.load(text, _LOADER)
    for rule in content["rules"]:
        rule["forms"] = tuple(_form(form, content["fragments"]) for form in rule["forms"])
        rule["severity"] = Severity[rule["severity"].upper()]
        rule |= {key: tuple(rule.get(key, ())) for key in ("options", "context")}
        yield RuleSpec(**rule)


def _form(form: dict[str, Any], fragments: Mapping[str, str]) -> Form:
    texts = {key: text for key, text in form.items() if isinstance(text, str)}
    return Form(**form | {key: _filled(text, fragments) for key, text in texts.items()})


def _filled(pattern: str, fragments: Mapping[str, str]) -> str:
    """Replace the fragments in `pattern`, which may hold others."""
    while _FRAGMENT.search(pattern):
        pattern = _FRAGMENT.sub(lambda match: fragments[match[1]], pattern)
    return pattern
