r"""The view of an answer that patterns are matched on, and its further readings.

The view has no invisible characters, and look-alikes of ASCII as ASCII. Full-width and mathematical
letters, digits of every script and the many dashes become ASCII. Each character is mapped by
itself, so that a stream and a whole text read alike: it is left out, becomes one ASCII character,
or stays.

Whoever reads an answer may see its control characters, drop them (a log viewer), drop whole
terminal sequences with them (a terminal), and decode the escapes of JSON (`\u0034`) before. A value
that any of them sees must be found, so a text with control characters or backslashes has further
`readings`. A `TextReader` makes each of a stream and of a whole text alike.
"""

import re
import string
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Protocol

from typing_extensions import override

from gateway.safety.findings import Finding
from gateway.safety.text import characters as c

APART: Final = re.compile(rf"[\\{c.CONTROLS}]")
"""Characters that readings treat differently: backslash and control characters; line ends and tabs are
text.
"""
_CONTROLS: Final = frozenset(map(chr, c.members(c.CONTROLS)))
APART_CHARS: Final = _CONTROLS | {"\\"}
_UNSEEN: Final = frozenset(map(chr, c.members(c.INVISIBLE + c.BLANKS))) - _CONTROLS
_DASHES: Final = frozenset(map(chr, c.members(c.DASHES)))


class Scanner(Protocol):
    """Finds matches of rules. The result at an offset depends only on the text near it."""

    def scan(self, text: str) -> Sequence[Finding]:
        """Return all findings in `text`."""


@lru_cache(maxsize=65536)
def seen_as(char: str) -> str:
    """Return `char` in the view: one character, or "" for an invisible one."""
    if char.isascii():
        return char
    if char in _UNSEEN:
        return ""
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    if char in _DASHES:
        return "-"
    plain = unicodedata.normalize("NFKC", char)
    return plain if len(plain) == 1 and plain.isascii() else char


def view(text: str) -> tuple[str, Sequence[int]]:
    """Return `text` in the view, and for each character of the view its offset in `text`."""
    if text.isascii():
        return text, range(len(text))
    characters = [(index, plain) for index, char in enumerate(text) if (plain := seen_as(char))]
    return "".join(plain for _, plain in characters), [index for index, _ in characters]


def is_control(char: str) -> bool:
    """Return whether `char` is a control character."""
    return char in _CONTROLS


@dataclass(frozen=True)
class Reading:
    """One reading of a text: for each of its characters the place in the text that it was made from."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]


def readings(text: str) -> Iterator[Reading]:
    """Yield the readings of `text`: the view, and those that may differ from it, the shortest last."""
    plain, offsets = view(text)
    same = isinstance(offsets, range)
    ends = range(1, len(text) + 1) if same else [offset + 1 for offset in offsets]
    yield Reading(plain, offsets, ends)
    if APART.search(text) is None:
        return
    controls = any(map(is_control, text))
    for kind in KINDS:
        if "\\" in text if kind.decodes else controls:
            yield _reading(text, TextReader(kind))


def _reading(text: str, reader: "TextReader") -> Reading:
    chars, starts, ends = [], [], []
    for index, char in enumerate(text):
        read, width = reader.take(char)
        if read and (plain := seen_as(read)):
            chars.append(plain)
            starts.append(index + 1 - width)
            ends.append(index + 1)
    return Reading("".join(chars), starts, ends)


@dataclass(frozen=True)
class ReadingKind:
    """A way to read.

    Attributes:
        decodes: escapes of JSON are decoded.
        sequences: terminal sequences are dropped whole, not only their control characters.
    """

    decodes: bool
    sequences: bool


KINDS: Final = (
    ReadingKind(False, False),
    ReadingKind(False, True),
    ReadingKind(True, False),
    ReadingKind(True, True),
)

_ESCAPED: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX: Final = frozenset(string.hexdigits)
_ESCAPE_CHARS: Final = len(r"\u0000")


class TextReader:
    """Reads one text, character by character.

    Attributes:
        kind: the way to read.
    """

    def __init__(self, kind: ReadingKind) -> None:
        self.kind = kind
        self._escape = ""
        """Escape of JSON that has begun."""
        self._sequences = _Sequences() if kind.sequences else None

    @property
    def begun(self) -> int:
        """Length of an escape of JSON that is not complete, in characters."""
        return len(self._escape)

    @property
    def is_inside(self) -> bool:
        """Whether the next character is no text by itself."""
        in_sequence = self._sequences is not None and self._sequences.is_open
        return bool(self._escape) or in_sequence

    def take(self, char: str) -> tuple[str, int]:
        """Return the character that `char` completes, empty for none, and how many were read for it."""
        width = 1
        if self.kind.decodes:
            char, width = self._decoded(char)
        if not char or self._drops(char):
            return "", width
        return char, width

    def _drops(self, char: str) -> bool:
        return is_control(char) if self._sequences is None else self._sequences.hides(char)

    def _decoded(self, char: str) -> tuple[str, int]:
        escape, self._escape = self._escape, ""
        if char == "\\" and escape != "\\":  # behind a broken escape, too
            self._escape = char
            return "", 1
        if not escape:
            return char, 1
        if len(escape) == 1 and char != "u":
            return _ESCAPED.get(char, char), 2
        if len(escape) > 1 and char not in _HEX:
            return char, 1
        escape += char
        if len(escape) < _ESCAPE_CHARS:
            self._escape = escape
            return "", 1
        code = chr(int(escape[2:], 16))
        return "" if "\ud800" <= code <= "\udfff" else code, _ESCAPE_CHARS


_SEQUENCE_MAX: Final = 256
"""Longest sequence that is left out, in characters; what follows is text, so that none hides the rest
of an answer.
"""


class _Sequences:
    """Follows terminal sequences (ECMA-48) in one text, character by character."""

    def __init__(self) -> None:
        self._mode = ""
        """What has begun: a mode of `_step`; empty in text."""
        self._length = 0

    @property
    def is_open(self) -> bool:
        """Whether a sequence has begun and not ended."""
        return bool(self._mode)

    def hides(self, char: str) -> bool:
        """Return whether `char` belongs to a sequence, or is a control character outside of one."""
        # An open sequence must not hide the rest of an answer.
        if self._length >= _SEQUENCE_MAX:
            self._mode = ""
        self._mode, hidden = self._step(char)
        self._length = self._length + 1 if self._mode else 0
        return hidden

    def _step(self, char: str) -> tuple[str, bool]:
        mode = self._mode
        if not seen_as(char):
            return mode, True
        if mode == "string":
            return _IN_STRING.get(char, mode), True
        if mode == "string end" and char == "\\":
            return "", True
        if mode in ("escape", "string end") and char in _AFTER_ESCAPE:
            return _AFTER_ESCAPE[char], True
        if mode == "parameters" and "0" <= char <= "?":
            return mode, True
        if mode and " " <= char <= "/":
            return mode if mode in _INTERMEDIATE else _INTERMEDIATE[mode == "parameters"], True
        if mode and _FIRST_FINAL[mode] <= char <= "~":
            return "", True
        return _BEGINS.get(char, ""), char in _CONTROLS


_AFTER_ESCAPE: Final = {"[": "parameters", **dict.fromkeys("]PX^_", "string")}
_BEGINS: Final = {
    "\x1b": "escape",
    "\x9b": "parameters",
    **dict.fromkeys("\x90\x98\x9d\x9e\x9f", "string"),
}
_IN_STRING: Final = {"\x07": "", "\x9c": "", "\x1b": "string end"}
_INTERMEDIATE: Final = ("of a function", "of parameters")
_FIRST_FINAL: Final = {
    "escape": "0",
    "string end": "0",
    "of a function": "0",
    "parameters": "@",
    "of parameters": "@",
}
"""First character that ends a sequence, by mode."""


class ViewScanner(Scanner):
    """Scanners that look at all readings; their findings are spans of the text itself."""

    def __init__(self, *scanners: Scanner) -> None:
        self._scanners = scanners

    @override
    def scan(self, text: str) -> list[Finding]:
        findings: dict[Finding, None] = {}
        for reading in readings(text):
            for scanner in self._scanners:
                for finding in scanner.scan(reading.text):
                    if finding.end > finding.start:
                        start, end = reading.starts[finding.start], reading.ends[finding.end - 1]
                        findings[replace(finding, start=start, end=end)] = None
        return list(findings)
