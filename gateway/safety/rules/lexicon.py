"""The operator's lists of words and phrases: tens of thousands of entries in one automaton (Aho-Corasick).

Case is folded one character for one, so offsets stay. An entry of a whole-word list does not match inside a longer
word; scripts that do not put spaces between words have no such boundary.
"""

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ahocorasick_rs import AhoCorasick

from gateway.safety.findings import Finding, Severity
from gateway.safety.rules.spec import RuleError, Span
from gateway.safety.text.characters import UNSPACED

ENTRY_CHARS_MAX: Final = 256

_UNSPACED: Final = re.compile(f"[{UNSPACED}]")


class ListKind(enum.Enum):
    """The effect of being on a list."""

    DENY = "deny"
    """A finding "deny.NAME"."""
    ALLOW = "allow"
    """Findings that lie inside the phrase are taken back, those of limits excepted."""


@dataclass(frozen=True, slots=True)
class PhraseList:
    """Words and phrases of one purpose."""

    name: str
    entries: tuple[str, ...]
    kind: ListKind = ListKind.DENY
    severity: Severity = Severity.HIGH


class Lexicon:
    """Phrase lists, compiled once."""

    def __init__(self, lists: Sequence[PhraseList]) -> None:
        """Raises `RuleError` for empty and overlong entries."""
        flat = [(each, entry) for each in lists for entry in dict.fromkeys(each.entries)]
        folded = [_checked(each, entry) for each, entry in flat]
        self._lists = [each for each, _ in flat]
        self._automaton = AhoCorasick(folded) if folded else None
        self.longest = max(map(len, folded), default=0)

    def matches(self, text: str) -> Iterator[tuple[PhraseList, Span]]:
        """Every entry that occurs, overlapping ones included."""
        if self._automaton is None:
            return
        for entry, start, end in self._automaton.find_matches_as_indexes(
            fold_case(text), overlapping=True
        ):
            each = self._lists[entry]
            if _is_whole(text, start, end):
                yield each, (start, end)

    def denied(self, text: str) -> Iterator[Finding]:
        """The findings of the deny lists."""
        for each, span in self.matches(text):
            if each.kind is ListKind.DENY:
                yield Finding(f"deny.{each.name}", *span, each.severity)


def fold_case(text: str) -> str:
    """Lower case, one character for one; the final sigma is a sigma."""
    lower = text.lower()
    if len(lower) != len(text):
        lower = "".join(low if len(low := char.lower()) == 1 else char for char in text)
    return lower if text.isascii() else lower.replace("ς", "σ")


def _checked(each: PhraseList, entry: str) -> str:
    if not entry.strip():
        raise RuleError(f"{each.kind.value}.{each.name}", "an entry is empty")
    if len(entry) > ENTRY_CHARS_MAX:
        raise RuleError(
            f"{each.kind.value}.{each.name}",
            f"an entry is longer than {ENTRY_CHARS_MAX} characters",
        )
    return fold_case(entry)


def _is_whole(text: str, start: int, end: int) -> bool:
    return not (
        (start > 0 and _joined(text[start - 1], text[start]))
        or (end < len(text) and _joined(text[end - 1], text[end]))
    )


def _joined(left: str, right: str) -> bool:
    return _in_word(left) and _in_word(right)


def _in_word(char: str) -> bool:
    return (char.isalnum() or char == "_") and _UNSPACED.match(char) is None
