"""Calls of tools, and reasoning, in an answer whose text arrives in pieces.

What has been found after some text depends on the text alone, not on how it was cut into pieces. A call is given out
when its JSON is complete. What looks like a call and is none stays text: broken JSON, a tool that the request does not
have. Blanks around calls are dropped.
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tools import ToolFormat, ToolUse, map_texts
from sluice.openai.fields import load_json
from sluice.v1 import inference_pb2 as pb
from sluice.wire.text_tokens import REASONING, REASONING_END

_BLANKS: Final = " \t\r\n"


@dataclass
class Parsed:
    """What a piece of the answer completed; calls have no ids yet."""

    text: str = ""
    calls: list[pb.ToolCall] = field(default_factory=list)


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
        self._rest = ""
        """Not given out yet: in a block, from the last call on."""
        self._at = 0
        """What of it has been looked at."""
        self._may_end = False
        """Whether the answer may end here: no object has begun."""
        self._blanks = ""
        self._parsed = Parsed()
        self._reading = self._read()

    def push(self, text: str) -> Parsed:
        """What is complete with ``text``."""
        self._rest += text
        next(self._reading)
        return self._take()

    def flush(self) -> str:
        """The rest, when no more text comes: it is text."""
        end = self._rest.strip(_BLANKS + self._form.separators)
        if not (self._may_end and self._form.closing.startswith(end)):
            self._show(self._rest)
        self._rest = ""
        if not self.calls:
            self._parsed.text += self._blanks
        self._blanks = ""
        return self._take().text

    def _take(self) -> Parsed:
        parsed, self._parsed = self._parsed, Parsed()
        return parsed

    def _read(self) -> Iterator[None]:
        """Goes through the answer; here and below each ``yield`` waits for more of it."""
        if self._form.bare:
            while not (begun := self._rest.lstrip(_BLANKS)):
                yield
            if begun[0] == "{":
                yield from self._objects()
        while True:
            yield from self._opening()
            while not self._skip(_BLANKS):
                yield
            if self._rest.startswith(self._form.start, self._at):
                self._at += len(self._form.start)
                yield from self._objects()
            else:
                self._leave(self._at)

    def _opening(self) -> Iterator[None]:
        """Text, up to an opening."""
        opening = self._form.opening
        while (start := self._rest.find(opening)) < 0:
            self._leave(len(self._rest) - _possible_start(self._rest, opening))
            yield
        self._leave(start)
        self._at = len(opening)

    def _objects(self) -> Iterator[None]:
        """The objects of a block, to its end; what is no call is text, and so is a block without one."""
        closing, committed = self._form.closing, False
        while True:
            behind = self._skip(_BLANKS + self._form.separators)
            if closing and behind.startswith(closing):
                return self._leave(self._at + len(closing), shows=not committed)
            if closing.startswith(behind):
                self._may_end = True
                yield
                self._may_end = False
                continue
            if behind[0] != "{":
                return self._leave(self._at)
            end = yield from self._object_end()
            call = self._call(self._rest[:end])
            if call is None:
                return self._leave(end)
            if not (self._single and self.calls):
                self._parsed.calls.append(call)
            self.calls += 1
            self._blanks, committed = "", True
            self._leave(end, shows=False)

    def _object_end(self) -> Generator[None, None, int]:
        """The index behind the object that begins here."""
        depth, in_string, escaped, start = 0, False, False, self._at
        while True:
            for at in range(start, len(self._rest)):
                character = self._rest[at]
                if escaped:
                    escaped = False
                elif in_string:
                    escaped, in_string = character == "\\", character != '"'
                elif character == '"':
                    in_string = True
                elif character in "{}":
                    depth += 1 if character == "{" else -1
                    if not depth:
                        return at + 1
            start = len(self._rest)
            yield

    def _skip(self, characters: str) -> str:
        """Passes ``characters``; what follows already."""
        behind = self._rest[self._at :].lstrip(characters)
        self._at = len(self._rest) - len(behind)
        return behind

    def _leave(self, end: int, *, shows: bool = True) -> None:
        """What is left begins at ``end``; what was before is text, unless it ``shows`` not."""
        if shows:
            self._show(self._rest[:end])
        self._rest, self._at = self._rest[end:], 0

    def _show(self, text: str) -> None:
        """Gives out ``text``, but for blanks at its end: a call may follow."""
        shown = text.rstrip(_BLANKS)
        if shown:
            self._parsed.text += self._blanks + shown
            self._blanks = ""
        self._blanks += text[len(shown) :]

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
    """Length of the longest end of ``text`` that begins ``opening``."""
    for length in range(min(len(text), len(opening) - 1), 0, -1):
        if text.endswith(opening[:length]):
            return length
    return 0


class PartFilter(Protocol):
    """Decides about what is assembled from an answer (`gateway.safety.output.assembled`)."""

    @property
    def blocked(self) -> tuple[str, ...]:
        """The rules that ended the answer."""

    def note(self, written: str) -> None:
        """Take the next part of the answer as it was written."""

    def push(self, text: str) -> str:
        """Return what may be shown after ``text`` was assembled."""

    def push_reasoning(self, text: str) -> str:
        """Return what may be shown of the reasoning after ``text`` was assembled."""

    def finish(self) -> tuple[str, str]:
        """Return the rest of the text and of the reasoning."""

    def value(self, text: str) -> str:
        """Return what may be shown of a whole value."""


_MARKS: Final = re.compile(f"([{REASONING}{REASONING_END}])")


class PartEvents:
    """Finds calls and reasoning in the messages of one answer, as far as one call reads them."""

    def __init__(
        self,
        use: ToolUse | None,
        tokenizer_of: Callable[[str], ModelTokenizer],
        text_before: Callable[[int], str],
        held: int = 0,
        new_filter: Callable[[], PartFilter | None] = lambda: None,
    ) -> None:
        """The messages of an answer.

        Args:
            use: the tools of the request; None: it has none.
            tokenizer_of: that of a model, by name: how it writes calls, and whether it marks its reasoning.
            text_before: the token of an index.
            held: tokens of the caller.
            new_filter: makes the filter of a model's answer; None: answers are not filtered.
        """
        self._use = use
        self._tokenizer_of = tokenizer_of
        self._text_before = text_before
        self._request_id = ""
        self._index = held
        """Tokens of the answer so far."""
        self._has_begun = False
        self._new_filter = new_filter
        self._filter: PartFilter | None = None

    @property
    def blocked(self) -> tuple[str, ...]:
        """The rules by which what was assembled ended the answer: nothing else may be shown."""
        return () if self._filter is None else self._filter.blocked

    def change(self, response: pb.GenerateResponse) -> bool:
        """Makes the next message what the caller gets; whether anything is left of it."""
        if response.HasField("started"):
            self._request_id = response.started.request_id
            self._use_model(response.started.model)
        for notice in response.notices:
            if notice.kind == pb.NOTICE_KIND_ESCALATED:
                self._use_model(notice.model)
                self._index = 0  # what a caller had of another model's answer is void
        if response.HasField("delta") or response.HasField("finished"):
            self._begin()
            self._change_delta(response)
            if self.blocked:
                self._block(response)
        return bool(response.ListFields())

    def _use_model(self, model: str) -> None:
        tokenizer = self._tokenizer_of(model)
        self._marks_reasoning, self._reasons = tokenizer.marks_reasoning, False
        self._parser: ToolCallParser | None = None
        self._filter = self._new_filter()
        if self._use is not None:
            assert tokenizer.tool_format is not None, "its prompt had tools"
            self._format = tokenizer.tool_format
            names = [tool.name for tool in self._use.callable]
            self._parser = ToolCallParser(self._format, names, single=self._use.single)
        self._calls = 0
        self._has_begun = False

    def _begin(self) -> None:
        """Goes over what the caller has had. Only now: tokens with hidden text are computed again."""
        if not self._has_begun:
            self._has_begun = True
            if self._index:
                _, found = self._parse(self._text_before(self._index))
                self._calls += len(found.calls)

    def _change_delta(self, response: pb.GenerateResponse) -> None:
        """Reads the text, and at the end of the answer what was held back of it."""
        delta, finished, found = response.delta, response.HasField("finished"), Parsed()
        if self.blocked:
            response.ClearField("delta")
            return
        if response.HasField("delta"):
            self._index = delta.index + len(delta.token_ids)
            self._blank_reasoning(delta)
            delta.reasoning, found = self._parse(delta.text)
        else:
            delta.index = self._index
        if finished:
            self._finish(delta, found)
        self._put(delta, found)
        if not (delta.token_ids or delta.text or delta.tool_calls or delta.reasoning):
            response.ClearField("delta")
        if finished and self._calls and response.finished.reason == pb.FINISH_REASON_STOP:
            response.finished.reason = pb.FINISH_REASON_TOOL_CALLS

    def _finish(self, delta: pb.Delta, found: Parsed) -> None:
        """Add what was held back."""
        filter_ = self._filter
        if self._parser is not None:
            rest = self._parser.flush()
            found.text += rest if filter_ is None else filter_.push(rest)
        if filter_ is not None:
            text, reasoning = filter_.finish()
            found.text += text
            delta.reasoning += reasoning

    def _block(self, response: pb.GenerateResponse) -> None:
        """End the answer; a message in which it ends shows no tokens, which would tell what its text does not."""
        if response.HasField("delta"):
            delta = response.delta
            shown = pb.Delta(index=delta.index, text=delta.text, reasoning=delta.reasoning)
            delta.CopyFrom(shown)
        if response.HasField("finished"):
            response.finished.reason = pb.FINISH_REASON_CONTENT_FILTER
            response.finished.rules[:] = self.blocked
            response.finished.ClearField("stop")

    def _parse(self, text: str) -> tuple[str, Parsed]:
        """Of the next text the reasoning, and what the rest has."""
        reasoning, rest = self._split(text) if self._marks_reasoning else ("", text)
        parsed = Parsed(rest) if self._parser is None else self._parser.push(rest)
        if self._filter is None:
            return reasoning, parsed
        self._filter.note(text)
        for call in parsed.calls:
            call.arguments = _filtered(call.arguments, self._filter)
        parsed.text = self._filter.push(parsed.text)
        return self._filter.push_reasoning(reasoning), parsed

    def _blank_reasoning(self, delta: pb.Delta) -> None:
        """Leave the log-probabilities of tokens of the text alone; before the text is read."""
        if not (self._marks_reasoning and delta.logprobs):
            return
        before = self._reasons
        for entry in delta.logprobs:
            _, text = self._split(entry.text)
            if text != entry.text:
                entry.text, entry.token_bytes = text, text.encode()
            if not text:
                entry.Clear()
        self._reasons = before

    def _split(self, text: str) -> tuple[str, str]:
        """Of the next text what the model thought, and the rest."""
        parts: dict[bool, list[str]] = {True: [], False: []}
        for part in _MARKS.split(text):
            if part in (REASONING, REASONING_END):
                self._reasons = part == REASONING
            else:
                parts[self._reasons].append(part)
        return "".join(parts[True]), "".join(parts[False])

    def _put(self, delta: pb.Delta, parsed: Parsed) -> None:
        delta.text = parsed.text
        for call in parsed.calls:
            call.id = self._format.call_id(f"{self._request_id} {self._calls}")
            self._calls += 1
        delta.tool_calls.extend(parsed.calls)


_WRITTEN_OTHERWISE: Final = re.compile(r"\\|[0-9](?:[eE]|\.[0-9])")
"""What a value is written with that the caller reads otherwise: escapes, and numbers with a fraction or exponent."""


def _filtered(arguments: str, filter_: PartFilter) -> str:
    """Return the JSON ``arguments`` with what may be shown of each value."""
    if _WRITTEN_OTHERWISE.search(arguments) is None:
        return arguments
    value = json.loads(arguments)
    changed = map_texts(value, filter_.value)
    return arguments if changed == value else json.dumps(changed, ensure_ascii=False)
