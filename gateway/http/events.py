"""Build an answer as named server-sent events, or as the object that they add up to.

The Responses API and Anthropic's Messages API share this: `EventAnswer` finds where texts and tool calls begin and end,
subclasses write the events.
"""

from collections.abc import Mapping
from typing import Any, Final

from typing_extensions import override

from gateway.http.answers import HttpAnswer, encode, sse
from sluice.v1 import inference_pb2 as pb

Json = dict[str, Any]
TEXT: Final = "text"
REASONING: Final = "reasoning"


def named_event(name: str, event: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with a name line."""
    return f"event: {name}\n".encode() + sse(event)


class EventAnswer(HttpAnswer):
    """One answer: a list of texts, of kind `TEXT` or `REASONING`, and tool calls.

    A subclass writes events with `_send`, which drops them unless the answer streams, and maintains `_whole`, the
    object of the complete answer.
    """

    def __init__(self, *, streams: bool) -> None:
        super().__init__()
        self._streams = streams
        self._whole: Json = {}
        self._events = b""
        """Events since the last `_take_events`."""
        self._open = ""
        """Kind of the current text; empty if there is none."""
        self._pieces: list[str] = []
        """Pieces of the current text."""

    @override
    def add(self, index: int, delta: pb.Delta) -> bytes:
        for kind, text in ((REASONING, delta.reasoning), (TEXT, delta.text)):
            if text:
                self._add_text(kind, text)
        for call in delta.tool_calls:
            self._end_text()
            self._add_call(call)
        return self._take_events()

    @override
    def end(self) -> bytes:
        """Return the whole answer, or nothing for a stream, whose last event has been sent."""
        return b"" if self._streams else encode(self._whole)

    def _send(self, name: str, event: Mapping[str, Any]) -> None:
        if self._streams:
            self._events += named_event(name, event)

    def _take_events(self) -> bytes:
        events, self._events = self._events, b""
        return events

    def _add_text(self, kind: str, text: str) -> None:
        if self._open != kind:
            self._end_text()
            self._open = kind
            self._begin_text(kind)
        self._pieces.append(text)
        self._send_text(kind, text)

    def _end_text(self) -> None:
        if kind := self._open:
            text = "".join(self._pieces)
            self._open, self._pieces = "", []
            self._close_text(kind, text)

    def _begin_text(self, kind: str) -> None:
        """Handle the start of a text."""
        raise NotImplementedError

    def _send_text(self, kind: str, text: str) -> None:
        """Handle a piece of the current text."""
        raise NotImplementedError

    def _close_text(self, kind: str, text: str) -> None:
        """Handle the end of a text, which is complete in `text`."""
        raise NotImplementedError

    def _add_call(self, call: pb.ToolCall) -> None:
        """Handle a complete tool call."""
        raise NotImplementedError
