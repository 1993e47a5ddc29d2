"""Find tool calls in an answer whose text arrives in pieces.

The result depends on the text alone, not on how it is cut into pieces. A tool call is emitted when its JSON is
complete. What looks like a tool call and is not one stays text, such as broken JSON or a tool that the
request does not offer. Blanks around tool calls are dropped.
"""

import json
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field
from typing import Final

from gateway.models.tools import ToolFormat
from sluice.openai.fields import load_json
from sluice.v1 import inference_pb2 as pb

_BLANKS: Final = " \t\r\n"


@dataclass
class Parsed:
    """Text and tool calls that a piece of the answer completed; tool calls have no ids yet."""

    text: str = ""
    calls: list[pb.ToolCall] = field(default_factory=list)


class ToolCallParser:
    """The parser of one answer.

    Attributes:
        calls: Number of tool calls so far, with those that `single` drops.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, single: bool = False) -> None:
        """Parse calls of the tools `names`; with `single`, drop those after the first."""
        self.calls = 0
        self._form = form
        self._names = frozenset(names)
        self._single = single
        self._rest = ""
        """Text that is not emitted yet: in a block, from the last tool call on."""
        self._at = 0
        """Number of its characters that have been read."""
        self._may_end = False
        """Whether the answer may end here, because no object has begun."""
        self._blanks = ""
        """Blanks that are dropped if a tool call follows."""
        self._parsed = Parsed()
        self._reading = self._read()

    def push(self, text: str) -> Parsed:
        """Add text, and return what it completes."""
        self._rest += text
        next(self._reading)
        return self._take()

    def flush(self) -> str:
        """Return the remaining text, when no more will come."""
        end = self._rest.strip(_BLANKS + self._form.separators)
        if not (self._may_end and self._form.closing.startswith(end)):
            self._emit(self._rest)
        self._rest = ""
        if not self.calls:
            self._parsed.text += self._blanks
        self._blanks = ""
        return self._take().text

    def _take(self) -> Parsed:
        parsed, self._parsed = self._parsed, Parsed()
        return parsed

    def _read(self) -> Iterator[None]:
        """Read the answer; here and below each `yield` waits for more text."""
        if self._form.bare:
            while not (pending := self._rest.lstrip(_BLANKS)):
                yield
            if pending[0] == "{":
                yield from self._objects()
        while True:
            yield from self._opening()
            while not self._skip(_BLANKS):
                yield
            if self._rest.startswith(self._form.start, self._at):
                self._at += len(self._form.start)
                yield from self._objects()
            else:
                self._advance(self._at)

    def _opening(self) -> Iterator[None]:
        """Emit text up to an opening."""
        opening = self._form.opening
        while (start := self._rest.find(opening)) < 0:
            self._advance(len(self._rest) - _possible_start(self._rest, opening))
            yield
        self._advance(start)
        self._at = len(opening)

    def _objects(self) -> Iterator[None]:
        """Read the objects of a block; text that is not a tool call, or a block without any, is emitted as text."""
        closing, has_call = self._form.closing, False
        while True:
            behind = self._skip(_BLANKS + self._form.separators)
            if closing and behind.startswith(closing):
                return self._advance(self._at + len(closing), is_text=not has_call)
            if closing.startswith(behind):  # nothing, or a part of the closing: wait for more
                self._may_end = True
                yield
                self._may_end = False
                continue
            # Not an object: the block is over, and the rest is read as text again.
            if behind[0] != "{":
                return self._advance(self._at)
            end = yield from self._object_end()
            call = self._call(self._rest[:end])
            if call is None:  # text that only looks like a tool call
                return self._advance(end)
            if not (self._single and self.calls):
                self._parsed.calls.append(call)
            self.calls += 1
            self._blanks, has_call = "", True
            self._advance(end, is_text=False)

    def _object_end(self) -> Generator[None, None, int]:
        """Return the index after the object that begins here."""
        depth, in_string, escaped, start = 0, False, False, self._at
        while True:
            for index in range(start, len(self._rest)):
                character = self._rest[index]
                if escaped:
                    escaped = False
                elif in_string:
                    escaped, in_string = character == "\\", character != '"'
                elif character == '"':
                    in_string = True
                elif character in "{}":
                    depth += 1 if character == "{" else -1
                    if not depth:
                        return index + 1
            start = len(self._rest)
            yield

    def _skip(self, characters: str) -> str:
        """Skip `characters`, and return what follows so far."""
        behind = self._rest[self._at :].lstrip(characters)
        self._at = len(self._rest) - len(behind)
        return behind

    def _advance(self, end: int, *, is_text: bool = True) -> None:
        """Move the start of the remaining text to `end`; emit what was before if it is text."""
        if is_text:
            self._emit(self._rest[:end])
        self._rest, self._at = self._rest[end:], 0

    def _emit(self, text: str) -> None:
        """Emit `text`, but hold back blanks at its end: a tool call may follow."""
        visible = text.rstrip(_BLANKS)
        if visible:
            self._parsed.text += self._blanks + visible
            self._blanks = ""
        self._blanks += text[len(visible) :]

    def _call(self, text: str) -> pb.ToolCall | None:
        start = text.find("{")
        try:
            value = load_json(text[start:])
            arguments = value.get("arguments", value.get("parameters", {}))
            if value.get("name") not in self._names or not isinstance(arguments, dict):
                return None
            dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError):
            return None
        return pb.ToolCall(name=value["name"], arguments=dumped)


def _possible_start(text: str, opening: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `opening`."""
    for length in range(min(len(text), len(opening) - 1), 0, -1):
        if text.endswith(opening[:length]):
            return length
    return 0
