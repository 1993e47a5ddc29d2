"""The operator's lists of words and phrases: tens of thousands of entries in one automaton (Aho-Corasick).

A finding inside an allowed phrase is dropped. Case is folded one character for one, so offsets
stay. An entry does not match inside a longer word; scripts that do not put spaces between words
have no such boundary.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from ahocorasick_rs import AhoCorasick

from gateway.safety.findings import Finding, Severity
from gateway.safety.rules.spec import Span
from gateway.safety.text.characters import UNSPACED

DENY_LIST: Final = "deny.list"
"""Name of the findings of the deny list."""

_UNSPACED: Final = re.compile(f"[{UNSPACED}]")


class Lexicon:
    """A deny list and an allow list, compiled once. Entries that occur inside each other are all found.

    Attributes:
        is_empty: whether no list has an entry.
        deny: entries of the deny list.
        allow: entries of the allow list.
    """

    def __init__(self, deny: Iterable[str] = (), allow: Iterable[str] = ()) -> None:
        """Compile the lists; entries are not empty."""
        self.deny, self.allow = tuple(dict.fromkeys(deny)), tuple(dict.fromkeys(allow))
        denied, allowed = list(map(fold_case, self.deny)), list(map(fold_case, self.allow))
        self._denied = len(denied)
        self.is_empty = not denied and not allowed
        self._automaton = AhoCorasick([*denied, *allowed])

    def denied(self, text: str) -> list[Finding]:
        """Return the findings of the deny list."""
        return [Finding(DENY_LIST, *span, Severity.HIGH) for span in self._spans(text)[0]]

    def without_allowed(self, text: str, findings: Sequence[Finding]) -> list[Finding]:
        """Return `findings` without those inside an allowed phrase of `text`; those of limits stay."""
        allowed = sorted(self._spans(text)[1])
        if not allowed:
            return list(findings)
        furthest = list(accumulate((end for _, end in allowed), max))

        def stands(finding: Finding) -> bool:
            at = bisect_right(allowed, finding.start, key=lambda span: span[0])
            return at == 0 or furthest[at - 1] < finding.end or finding.rule.startswith("limit.")

        return [finding for finding in findings if stands(finding)]

    def _spans(self, text: str) -> tuple[list[Span], list[Span]]:
        """Return where entries of the two lists occur."""
        spans: tuple[list[Span], list[Span]] = [], []
        if not self.is_empty:
            folded = fold_case(text)
            for entry, start, end in self._automaton.find_matches_as_indexes(
                folded, overlapping=True
            ):
                # "cat" in "category" is no word of the list.
                if _is_whole(text, start, end):
                    spans[entry >= self._denied].append((start, end))
        return spans


def fold_case(text: str) -> str:
    """Return `text` in lower case, one character for one; the final sigma is a sigma."""
    lower = text.lower()
    if len(lower) != len(text):
        lower = "".join(low if len(low := char.lower()) == 1 else char for char in text)
    return lower if text.isascii() else lower.replace("ς", "σ")


def _is_whole(text: str, start: int, end: int) -> bool:
    inner = (at for at in (start, end) if 0 < at < len(text))
    return not any(_in_word(text[at - 1]) and _in_word(text[at]) for at in inner)


def _in_word(char: str) -> bool:
    return (char.isalnum() or char == "_") and _UNSPACED.match(char) is None


NO_LISTS: Final = Lexicon()
