"""What a pattern matched, before anybody believed it."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from gateway.safety.rules.spec import RuleSpec
from gateway.safety.rules.work import Work

Span = tuple[int, int]
"""Start and end, in characters."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A match of a pattern, with the text around it.

    A validator may look `LOOKBEHIND` characters back and `LOOKAHEAD` ahead, and further only through `run`, which is
    counted and bounded by the rule's `max_length`.
    """

    text: str
    start: int
    end: int
    spec: RuleSpec
    work: Work

    @property
    def value(self) -> str:
        """The text that matched."""
        return self.text[self.start : self.end]

    @property
    def span(self) -> Span:
        """The place of the match."""
        return self.start, self.end

    def before(self, chars: int) -> str:
        """At most so many characters before the match."""
        assert chars <= LOOKBEHIND, "a stream keeps no more"
        return self.text[max(0, self.start - chars) : self.start]

    def after(self, chars: int) -> str:
        """At most so many characters behind the match."""
        assert chars <= LOOKAHEAD, "a stream waits for no more"
        return self.text[self.end : self.end + chars]

    def run(self, pattern: re.Pattern[str], start: int) -> int:
        """The end of what ``pattern`` matches at ``start``, at most `max_length` behind the candidate's start."""
        limit = min(len(self.text), self.start + self.spec.max_length)
        found = pattern.match(self.text, start, limit)
        end = found.end() if found else start
        self.work.chars_read += end - start
        return end


LOOKBEHIND = 32
"""How far before a match a validator looks, in characters. Context words come on top."""
LOOKAHEAD = 8
"""How far behind a match a validator looks, in characters: a stream holds as much back behind every match."""

Validator = Callable[[Candidate], Span | None]
"""The place of the finding, which may be smaller or larger than the candidate, or None. A pure function."""
