"""Calls of tools, and reasoning, in the events of an answer."""

import re
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from gateway.tools.formats import ToolFormat
from gateway.tools.parser import Parsed, ToolCallParser
from gateway.tools.tool import ToolUse
from sluice.v1 import inference_pb2 as pb
from sluice.wire.text_tokens import REASONING, REASONING_END

_MARKS: Final = re.compile(f"([{REASONING}{REASONING_END}])")


class ReasoningSplitter:
    """Takes what the model thought out of a text that arrives in pieces."""

    def __init__(self) -> None:
        self._inside = False

    def push(self, text: str) -> tuple[str, str]:
        """Of the next piece the reasoning, and the rest."""
        parts: dict[bool, list[str]] = {True: [], False: []}
        for part in _MARKS.split(text):
            if part in (REASONING, REASONING_END):
                self._inside = part == REASONING
            else:
                parts[self._inside].append(part)
        return "".join(parts[True]), "".join(parts[False])


class ModelSyntax(Protocol):
    """How a model writes calls of tools (None: it cannot), and whether it marks its reasoning."""

    tool_format: ToolFormat | None
    marks_reasoning: bool


class PartEvents:
    """Turns the events of one answer, as far as one call reads them, into events with calls and reasoning."""

    def __init__(
        self,
        use: ToolUse | None,
        syntax_of: Callable[[str], ModelSyntax],
        text_before: Callable[[int], str],
        held: int = 0,
    ) -> None:
        """The events of an answer.

        Args:
            use: the tools of the request; None: it has none.
            syntax_of: that of a model, by name.
            text_before: the token of an index.
            held: tokens of the caller.
        """
        self._use = use
        self._syntax_of = syntax_of
        self._text_before = text_before
        self._request_id = ""
        self._index = held
        """Tokens of the answer so far."""
        self._has_begun = False

    def events(self, event: pb.GenerateResponse) -> Iterator[pb.GenerateResponse]:
        """What the caller gets for the next ``event``."""
        match event.WhichOneof("event"):
            case "started":
                self._request_id = event.started.request_id
                self._use_model(event.started.model)
            case "notice" if event.notice.kind == pb.NOTICE_KIND_ESCALATED:
                self._use_model(event.notice.model)
                self._index = 0  # what a caller had of another model's answer is void
            case "delta":
                yield from self._delta(event.delta)
                return
            case "finished":
                yield from self._finished(event.finished)
                return
        yield event

    def _use_model(self, model: str) -> None:
        syntax = self._syntax_of(model)
        self._splitter = ReasoningSplitter() if syntax.marks_reasoning else None
        self._parser: ToolCallParser | None = None
        if self._use is not None:
            assert syntax.tool_format is not None, "its prompt had tools"
            self._format = syntax.tool_format
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

    def _delta(self, delta: pb.Delta) -> Iterator[pb.GenerateResponse]:
        self._begin()
        self._index = delta.index + len(delta.token_ids)
        changed = pb.Delta()
        changed.CopyFrom(delta)
        changed.reasoning, found = self._parse(delta.text)
        self._put(changed, found)
        if changed.token_ids or changed.text or changed.tool_calls or changed.reasoning:
            yield pb.GenerateResponse(delta=changed)

    def _finished(self, finished: pb.Finished) -> Iterator[pb.GenerateResponse]:
        self._begin()
        tail = pb.Delta(index=self._index)
        self._put(tail, Parsed() if self._parser is None else self._parser.flush())
        if tail.text or tail.tool_calls:
            yield pb.GenerateResponse(delta=tail)
        changed = pb.Finished()
        changed.CopyFrom(finished)
        if self._calls and finished.reason == pb.FINISH_REASON_STOP:
            changed.reason = pb.FINISH_REASON_TOOL_CALLS
        yield pb.GenerateResponse(finished=changed)

    def _parse(self, text: str) -> tuple[str, Parsed]:
        """Of the next text the reasoning, and what the rest has."""
        reasoning, rest = ("", text) if self._splitter is None else self._splitter.push(text)
        return reasoning, Parsed(rest) if self._parser is None else self._parser.push(rest)

    def _put(self, delta: pb.Delta, parsed: Parsed) -> None:
        delta.text = parsed.text
        for call in parsed.calls:
            call.id = self._format.call_id(f"{self._request_id} {self._calls}")
            self._calls += 1
        delta.tool_calls.extend(parsed.calls)
