"""Calls of tools in the events of an answer."""

from collections.abc import Callable, Iterator

from gateway.tools.formats import ToolFormat
from gateway.tools.parser import Parsed, ToolCallParser
from gateway.tools.tool import ToolUse
from sluice.v1.inference_pb2 import (
    FINISH_REASON_STOP,
    FINISH_REASON_TOOL_CALLS,
    NOTICE_KIND_ESCALATED,
    Delta,
    Finished,
    GenerateResponse,
)


class ToolCallEvents:
    """Turns the events of one answer, as far as one call reads them, into events with calls."""

    def __init__(
        self,
        use: ToolUse,
        format_of: Callable[[str], ToolFormat],
        text_before: Callable[[int], str],
        held: int = 0,
    ) -> None:
        """``format_of`` a model by name; ``text_before`` the token of an index; ``held``: tokens of the caller."""
        self._use = use
        self._format_of = format_of
        self._text_before = text_before
        self._request_id = ""
        self._index = held
        """Tokens of the answer so far."""
        self._has_begun = False

    def events(self, event: GenerateResponse) -> Iterator[GenerateResponse]:
        """What the caller gets for the next ``event``."""
        match event.WhichOneof("event"):
            case "started":
                self._request_id = event.started.request_id
                self._use_model(event.started.model)
            case "notice" if event.notice.kind == NOTICE_KIND_ESCALATED:
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
        self._format = self._format_of(model)
        names = [tool.name for tool in self._use.callable]
        self._parser = ToolCallParser(self._format, names, single=self._use.single)
        self._calls = 0
        self._has_begun = False

    def _begin(self) -> None:
        """Goes over what the caller has had. Only now: tokens with hidden text are computed again."""
        if not self._has_begun:
            self._has_begun = True
            if self._index:
                self._calls += len(self._parser.push(self._text_before(self._index)).calls)

    def _delta(self, delta: Delta) -> Iterator[GenerateResponse]:
        self._begin()
        self._index = delta.index + len(delta.token_ids)
        changed = Delta()
        changed.CopyFrom(delta)
        self._put(changed, self._parser.push(delta.text))
        if changed.token_ids or changed.text or changed.tool_calls:
            yield GenerateResponse(delta=changed)

    def _finished(self, finished: Finished) -> Iterator[GenerateResponse]:
        self._begin()
        tail = Delta(index=self._index)
        self._put(tail, self._parser.flush())
        if tail.text or tail.tool_calls:
            yield GenerateResponse(delta=tail)
        changed = Finished()
        changed.CopyFrom(finished)
        if self._calls and finished.reason == FINISH_REASON_STOP:
            changed.reason = FINISH_REASON_TOOL_CALLS
        yield GenerateResponse(finished=changed)

    def _put(self, delta: Delta, parsed: Parsed) -> None:
        delta.text = parsed.text
        for call in parsed.calls:
            call_id = self._format.call_id(f"{self._request_id} {self._calls}")
            delta.tool_calls.add(id=call_id, name=call.name, arguments=call.arguments)
            self._calls += 1
