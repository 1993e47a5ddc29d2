"""Finds calls of tools in the text of an answer that arrives in pieces.

What has been found after some text depends on the text alone, not on how it was cut into pieces. A call is given out
when its JSON is complete. What looks like a call and is none stays text: broken JSON, a tool that the request does not
have. Blanks around calls are dropped.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, NoReturn

from gateway.tools.formats import ToolFormat

_BLANKS: Final = " \t\r\n"


@dataclass(frozen=True)
class FoundCall:
    """A call; ``arguments`` is a JSON object."""

    name: str
    arguments: str


@dataclass
class Parsed:
    """What a piece of the answer completed."""

    text: str = ""
    calls: list[FoundCall] = field(default_factory=list)


class _State(Enum):
    START = auto()
    """Nothing but blanks so far; the format needs no opening."""
    TEXT = auto()
    BLOCK = auto()
    """Behind an opening, before the start of its objects."""
    BETWEEN = auto()
    """Before, between or behind objects."""
    OBJECT = auto()


class ToolCallParser:
    """The parser of one answer.

    Attributes:
        calls: how many were found.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, single: bool = False) -> None:
        """``names`` of the tools; ``single``: calls after the first are dropped."""
        self.calls = 0
        self._form = form
        self._names = frozenset(names)
        self._single = single
        self._state = _State.START if form.bare else _State.TEXT
        self._rest = ""
        """Not given out yet: in a block, from the last call on."""
        self._at = 0
        """What of it has been looked at."""
        self._scan = _ObjectScan()
        self._committed = False
        """Whether the block has had a call."""
        self._blanks = ""
        self._parsed = Parsed()

    def push(self, text: str) -> Parsed:
        """What is complete with ``text``."""
        self._rest += text
        while self._step():
            pass
        return self._take()

    def flush(self) -> Parsed:
        """The rest, when no more text comes."""
        end = self._rest.strip(_BLANKS + self._form.separators)
        if not (self._committed and self._state is _State.BETWEEN and self._closes(end)):
            self._show(self._rest)
        self._rest, self._state = "", _State.TEXT
        if not self.calls:
            self._parsed.text += self._blanks
        self._blanks = ""
        return self._take()

    def _take(self) -> Parsed:
        parsed, self._parsed = self._parsed, Parsed()
        return parsed

    def _step(self) -> bool:
        """Goes on by one part of the text; whether there may be more to do."""
        match self._state:
            case _State.START:
                return self._begin()
            case _State.TEXT:
                return self._find_opening()
            case _State.BLOCK:
                return self._find_start()
            case _State.BETWEEN:
                return self._find_object()
            case _State.OBJECT:
                return self._find_end()

    def _begin(self) -> bool:
        begun = self._rest.lstrip(_BLANKS)
        if not begun:
            return False
        self._state = _State.BETWEEN if begun[0] == "{" else _State.TEXT
        return True

    def _find_opening(self) -> bool:
        opening, rest = self._form.opening, self._rest
        start = rest.find(opening)
        if start < 0:
            keep = _possible_start(rest, opening)
            self._rest = rest[len(rest) - keep :]
            self._show(rest[: len(rest) - keep])
            return False
        self._show(rest[:start])
        self._rest, self._at, self._committed = rest[start:], len(opening), False
        self._state = _State.BLOCK
        return True

    def _find_start(self) -> bool:
        if not self._skip(_BLANKS) and self._form.start:
            return False
        if not self._rest.startswith(self._form.start, self._at):
            return self._break()
        self._at += len(self._form.start)
        self._state = _State.BETWEEN
        return True

    def _find_object(self) -> bool:
        if not self._skip(_BLANKS + self._form.separators):
            return False
        if self._rest[self._at] == "{":
            self._scan, self._state = _ObjectScan(), _State.OBJECT
            return True
        closing = self._form.closing
        if closing and self._rest.startswith(closing, self._at):
            return self._end_block(self._at + len(closing))
        return not self._closes(self._rest[self._at :]) and self._break()

    def _find_end(self) -> bool:
        end = self._scan.end(self._rest, self._at)
        if end is None:
            self._at = len(self._rest)
            return False
        call, self._at = self._call(self._rest[:end]), end
        if call is None:
            return self._break()
        if not (self._single and self.calls):
            self._parsed.calls.append(call)
        self.calls += 1
        self._blanks, self._committed = "", True
        self._rest, self._at, self._state = self._rest[end:], 0, _State.BETWEEN
        return True

    def _skip(self, characters: str) -> bool:
        """Passes ``characters``; whether something else follows already."""
        behind = self._rest[self._at :].lstrip(characters)
        self._at = len(self._rest) - len(behind)
        return bool(behind)

    def _closes(self, text: str) -> bool:
        """Whether ``text`` may become the end of a block."""
        return self._form.closing.startswith(text)

    def _end_block(self, end: int) -> bool:
        """The block ends at ``end``; one without a call is text."""
        if not self._committed:
            self._show(self._rest[:end])
        self._rest, self._state = self._rest[end:], _State.TEXT
        return True

    def _break(self) -> bool:
        """What follows is no call: up to here it is text."""
        self._show(self._rest[: self._at])
        self._rest, self._state = self._rest[self._at :], _State.TEXT
        return True

    def _show(self, text: str) -> None:
        """Gives out ``text``, but for blanks at its end: a call may follow."""
        shown = text.rstrip(_BLANKS)
        if shown:
            self._parsed.text += self._blanks + shown
            self._blanks = ""
        self._blanks += text[len(shown) :]

    def _call(self, text: str) -> FoundCall | None:
        start = text.find("{")
        try:
            value = json.loads(text[start:], parse_constant=_refuse)
            arguments = value.get("arguments", value.get("parameters", {}))
            if value.get("name") not in self._names or not isinstance(arguments, dict):
                return None
            dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            dumped.encode()  # halves of surrogate pairs have no UTF-8
        except (ValueError, TypeError, RecursionError):
            return None
        return FoundCall(str(value["name"]), dumped)


class _ObjectScan:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str, start: int) -> int | None:
        """The index behind the object in ``text``; it was looked at up to ``start``."""
        for at in range(start, len(text)):
            self._take(text[at])
            if self._depth == 0:
                return at + 1
        return None

    def _take(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in "{}":
            self._depth += 1 if character == "{" else -1


def _possible_start(text: str, opening: str) -> int:
    """Length of the longest end of ``text`` that begins ``opening``."""
    for length in range(min(len(text), len(opening) - 1), 0, -1):
        if text.endswith(opening[:length]):
            return length
    return 0


def _refuse(constant: Any) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
