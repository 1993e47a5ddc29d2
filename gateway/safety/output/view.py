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
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

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


@dataclass(frozen=True)
class Reading:
    """One reading of a text: for each of its characters the place in the text that it was made from."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]


def view(text: str) -> Reading:
    """Return `text` as patterns are matched on it."""
    if text.isascii():
        return Reading(text, range(len(text)), range(1, len(text) + 1))
    return _reading(text, None)


def readings(text: str) -> Iterator[Reading]:
    """Yield the readings of `text`: the view, and those that may differ from it, the shortest last."""
    yield view(text)
    controls = not _CONTROLS.isdisjoint(text)
    for kind in KINDS:
        if "\\" in text if kind.decodes else controls:
            yield _reading(text, TextReader(kind))


def _reading(text: str, reader: "TextReader | None") -> Reading:
    chars, starts, ends = [], [], []
    for index, char in enumerate(text):
        read, width = (char, 1) if reader is None else reader.take(char)
        if read and (plain := seen_as(read)):
            chars.append(plain)
            starts.append(index + 1 - width)
            ends.append(index + 1)
    return Reading("".join(chars), starts, ends)


class ReadingKind(NamedTuple):
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
_ESCAPE: Final = re.compile(r"\\(?:[^u]|u[0-9A-Fa-f]{4})")
_ESCAPE_BEGUN: Final = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")

_CSI: Final = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*"
_STRING: Final = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*"
_SEQUENCE: Final = re.compile(
    rf"{_CSI}[@-~]|{_STRING}(?:[\x07\x9c]|\x1b\\)|\x1b(?:[ -/]+[0-~]|[0-OQ-WYZ\\`-~])"
)
_SEQUENCE_BEGUN: Final = re.compile(rf"{_CSI}|{_STRING}\x1b?|\x1b[ -/]*")
"""Terminal sequences (ECMA-48), and what may become one."""
_SEQUENCE_MAX: Final = 256
"""Longest sequence that is left out, in characters; what follows is text, so that none hides the rest
of an answer.
"""


class TextReader:
    """Reads one text, character by character.

    Attributes:
        kind: the way to read.
    """

    def __init__(self, kind: ReadingKind) -> None:
        self.kind = kind
        self._escape = ""
        """Escape of JSON that has begun."""
        self._sequence = ""
        """Terminal sequence that has begun."""

    @property
    def begun(self) -> int:
        """Length of an escape of JSON that is not complete, in characters."""
        return len(self._escape)

    @property
    def is_inside(self) -> bool:
        """Whether the next character is no text by itself."""
        return bool(self._escape or self._sequence)

    def take(self, char: str) -> tuple[str, int]:
        """Return the character that `char` completes, empty for none, and how many were read for it."""
        width = 1
        if self.kind.decodes:
            char, width = self._decoded(char)
        if not char or self._hides(char):
            return "", width
        return char, width

    def _decoded(self, char: str) -> tuple[str, int]:
        escape, self._escape = self._escape + char, ""
        if _ESCAPE.fullmatch(escape):
            if len(escape) == 2:
                return _ESCAPED.get(char, char), 2
            code = chr(int(escape[2:], 16))
            return "" if "\ud800" <= code <= "\udfff" else code, len(escape)
        if _ESCAPE_BEGUN.fullmatch(escape):
            self._escape = escape
            return "", 1
        # Behind a broken escape, too, another may begin.
        self._escape = "\\" if char == "\\" else ""
        return char.strip("\\"), 1

    def _hides(self, char: str) -> bool:
        """Return whether `char` belongs to a sequence, or is a control character outside of one."""
        if not self.kind.sequences:
            return char in _CONTROLS
        if not seen_as(char):
            return True
        begun = "" if len(self._sequence) >= _SEQUENCE_MAX else self._sequence
        self._sequence = ""
        # A broken sequence ends where another one begins: with this character, or with an escape before it.
        for sequence in (begun + char, (begun + char)[-2:], char):
            if _SEQUENCE.fullmatch(sequence):
                return True
            if _SEQUENCE_BEGUN.fullmatch(sequence):
                self._sequence = sequence
                return True
        return char in _CONTROLS


@dataclass(slots=True, eq=False)
class Place:
    """How far one reading of an answer has come; `reader` is None for the view."""

    reader: TextReader | None


P = TypeVar("P", bound=Place)


class ReadingsWatch(ABC, Generic[P]):
    """Follows an answer in the view, and in the readings that differ from it until they agree again.

    Attributes:
        view: place in the view.
        further: places in readings that differ from it.
        end: number of characters followed so far.
    """

    def __init__(self, view: P) -> None:
        self.view = view
        self.further: list[P] = []
        self.end = 0

    def begun_at(self, place: P) -> int:
        """Return the offset where an escape of JSON begins that is not complete; the end if there is none."""
        return self.end - (0 if place.reader is None else place.reader.begun)

    @abstractmethod
    def _step(self, place: P, char: str, width: int) -> None:
        """Follow `char` in one reading, which made it from the last `width` characters."""

    @abstractmethod
    def _state(self, place: P) -> object:
        """Return all that decides how a place goes on."""

    def _omit(self) -> None:
        """Note that a reading leaves out the last character."""

    def _follow(self, text: str) -> None:
        for char in text:
            if char in APART_CHARS:
                self._fork(char)
            self._step(self.view, char, 1)
            if self.further:
                self._follow_further(char)
            self.end += 1

    def _follow_further(self, char: str) -> None:
        for place in self.further:
            assert place.reader is not None, "only the view has none"
            read, width = place.reader.take(char)
            if read:
                self._step(place, read, width)
            else:
                self._omit()
        state = self._state(self.view)
        self.further = [
            place
            for place in self.further
            if (place.reader and place.reader.is_inside) or self._state(place) != state
        ]

    def _fork(self, char: str) -> None:
        """Begin the readings that may differ from here on; they have come as far as the view."""
        kinds = [place.reader.kind for place in self.further if place.reader]
        self.further += [
            replace(self.view, reader=TextReader(kind))
            for kind in KINDS
            # A backslash means something only where escapes of JSON are decoded.
            if kind not in kinds and (kind.decodes or char != "\\")
        ]


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
