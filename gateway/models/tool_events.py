"""Find tool calls and reasoning in an answer whose text arrives in pieces.

The result depends on the text alone, not on how it is cut into pieces. A tool call is emitted when its JSON is
complete. What looks like a tool call and is not one stays text, such as broken JSON or a tool that the
request does not offer. Blanks around tool calls are dropped.
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field
from typing import Final

from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tools import ToolFormat, ToolUse, map_texts
from gateway.safety.output.assembled import AssembledFilter
from sluice.openai.fields import load_json
from sluice.v1 import inference_pb2 as pb
from sluice.wire.text_tokens import REASONING, REASONING_END

_BLANKS: Final = " \t\r\n"


@dataclass
class Parsed:
    """Text and tool calls that a piece of the answer completed; tool calls have no ids yet."""

    text: str = ""
    calls: list[pb.ToolCall] = field(default_factory=list)


class ToolCallParser:
    """The parser of one answer.

    Attributes:
        calls: Number of tool calls so far.
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


_MARKS: Final = re.compile(f"([{REASONING}{REASONING_END}])")


class PartEvents:
    """Separates tool calls and reasoning from the text in the messages of one answer."""

    def __init__(
        self,
        use: ToolUse | None,
        tokenizer_of: Callable[[str], ModelTokenizer],
        text_before: Callable[[int], str],
        held_tokens: int = 0,
        new_filter: Callable[[], AssembledFilter | None] = lambda: None,
    ) -> None:
        """Start to read an answer.

        Args:
            use: Tools of the request; None if it has none.
            tokenizer_of: Returns the tokenizer of a model, which knows its format of tool calls and reasoning.
            text_before: Returns the text before the token with this index.
            held_tokens: Number of tokens that the caller already has.
            new_filter: Creates the filter of a model's answer, or returns None if answers are not filtered.
        """
        self._use = use
        self._tokenizer_of = tokenizer_of
        self._text_before = text_before
        self._request_id = ""
        self._index = held_tokens
        """Number of tokens of the answer so far."""
        self._has_begun = False
        self._new_filter = new_filter
        self._filter: AssembledFilter | None = None

    @property
    def blocked(self) -> tuple[str, ...]:
        """Rules that ended the answer because of assembled text; nothing else may be shown."""
        return () if self._filter is None else self._filter.blocked

    def change(self, response: pb.GenerateResponse) -> bool:
        """Rewrite the next message for the caller; return whether anything is left of it."""
        if response.HasField("started"):
            self._request_id = response.started.request_id
            self._use_model(response.started.model)
        for notice in response.notices:
            if notice.kind == pb.NOTICE_KIND_ESCALATED:
                self._use_model(notice.model)
                self._index = 0  # the answer starts again with another model
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
        """Read what the caller already has, before the first piece. Not earlier: its text may have to be computed."""
        if not self._has_begun:
            self._has_begun = True
            if self._index:
                _, parsed = self._parse(self._text_before(self._index))
                self._calls += len(parsed.calls)

    def _change_delta(self, response: pb.GenerateResponse) -> None:
        """Rewrite the text of a message, and at the end of the answer add what was held back."""
        delta, finished, parsed = response.delta, response.HasField("finished"), Parsed()
        if self.blocked:
            response.ClearField("delta")
            return
        if response.HasField("delta"):
            self._index = delta.index + len(delta.token_ids)
            self._blank_reasoning(delta)
            delta.reasoning, parsed = self._parse(delta.text)
        else:
            delta.index = self._index
        if finished:
            self._finish(delta, parsed)
        self._put(delta, parsed)
        if not (delta.token_ids or delta.text or delta.tool_calls or delta.reasoning):
            response.ClearField("delta")
        if finished and self._calls and response.finished.reason == pb.FINISH_REASON_STOP:
            response.finished.reason = pb.FINISH_REASON_TOOL_CALLS

    def _finish(self, delta: pb.Delta, parsed: Parsed) -> None:
        """Add what was held back."""
        filter_ = self._filter
        if self._parser is not None:
            rest = self._parser.flush()
            parsed.text += rest if filter_ is None else filter_.push(rest)
        if filter_ is not None:
            text, reasoning = filter_.finish()
            parsed.text += text
            delta.reasoning += reasoning

    def _block(self, response: pb.GenerateResponse) -> None:
        """End the answer. Its last message has no tokens, which would reveal the text that is not shown."""
        if response.HasField("delta"):
            delta = response.delta
            delta_of_block = pb.Delta(index=delta.index, text=delta.text, reasoning=delta.reasoning)
            delta.CopyFrom(delta_of_block)
        if response.HasField("finished"):
            response.finished.reason = pb.FINISH_REASON_CONTENT_FILTER
            response.finished.rules[:] = self.blocked
            response.finished.ClearField("stop")

    def _parse(self, text: str) -> tuple[str, Parsed]:
        """Return the reasoning in the next text, and what the rest completes."""
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
        """Remove the log-probabilities of reasoning; called before the text is parsed."""
        if not (self._marks_reasoning and delta.logprobs):
            return
        before = self._reasons  # `_split` changes it; the text is split again afterwards
        for entry in delta.logprobs:
            _, text = self._split(entry.text)
            if text != entry.text:
                entry.text, entry.token_bytes = text, text.encode()
            if not text:
                entry.Clear()
        self._reasons = before

    def _split(self, text: str) -> tuple[str, str]:
        """Split the next text into reasoning and the rest."""
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


_ESCAPED: Final = re.compile(r"\\|[0-9](?:[eE]|\.[0-9])")
"""Parts of JSON that parse into other text than they are written with: escapes, fractions and exponents."""


def _filtered(arguments: str, filter_: AssembledFilter) -> str:
    """Return the JSON `arguments` with what may be shown of each value."""
    # Without escapes, the text of the answer has been filtered as it is.
    if _ESCAPED.search(arguments) is None:
        return arguments
    value = json.loads(arguments)
    changed = map_texts(value, filter_.value)
    return arguments if changed == value else json.dumps(changed, ensure_ascii=False)
