"""The events of an answer become an object of /v1/responses, and the events of its stream."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.http.answers import encode
from sluice.v1 import inference_pb2 as pb

Json = dict[str, Any]
_INCOMPLETE: Final = {
    pb.FINISH_REASON_LENGTH: "max_output_tokens",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
}
_ECHOED: Final[Mapping[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1,
    "user": None,
}
"""Fields of the request that its answer repeats, with what they are by default."""


class ResponseEvents:
    """One answer.

    Attributes:
        request_id: of the request; empty until it is known.
    """

    def __init__(self, body: Mapping[str, Any], created: int) -> None:
        """``body``: of the request; ``created``: in seconds since 1970."""
        self.request_id = ""
        self._asked = {
            name: default if body.get(name) is None else body[name]
            for name, default in _ECHOED.items()
        }
        self._created = created
        self._model = ""
        self._output: list[Json] = []
        self._text: list[str] = []
        """Of the last item of the output, while it grows."""
        self._open: _TextItem | None = None
        """What that item is."""
        self._streams = bool(body.get("stream"))
        self._number = 0
        self._end: Json = {"status": "in_progress", "incomplete_details": None, "usage": None}
        self._sent = b""

    def take(self, event: pb.GenerateResponse) -> bytes:
        """What the next ``event`` adds to the stream; may be empty."""
        match event.WhichOneof("event"):
            case "started":
                self.request_id, self._model = event.started.request_id, event.started.model
            case "notice" if event.notice.kind == pb.NOTICE_KIND_ESCALATED:
                # Nothing of the first model's answer was sent: requests of this API do not set accept_replace.
                self._model = event.notice.model
            case "delta":
                if event.delta.reasoning:
                    self._add_text(event.delta.reasoning, _REASONING)
                if event.delta.text:
                    self._add_text(event.delta.text, _MESSAGE)
                for call in event.delta.tool_calls:
                    self._add_call(call)
            case "finished":
                self._finish(event.finished)
        sent, self._sent = self._sent, b""
        return sent

    def end(self) -> bytes:
        """The whole answer; of a stream its last event has been sent."""
        return b"" if self._streams else encode(self._response)

    @property
    def _response(self) -> Json:
        """The object as far as it is known."""
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "error": None,
            "output": self._output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._asked,
            **self._end,
        }

    def fail(self, body: Mapping[str, Any]) -> bytes:
        """The event that ends the stream with the error of ``body``."""
        error = body["error"]
        # OpenAI's reference has the error's fields in the event, its service, and so its clients, under "error".
        said = {name: error[name] for name in ("code", "message", "param")}
        self._say("error", **said, error=error)
        sent, self._sent = self._sent, b""
        return sent

    def _say(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._sent += f"event: {kind}\n".encode() + b"data: " + encode(event) + b"\n\n"

    def _begin(self) -> None:
        if not self._number:
            self._say("response.created", response=self._response)
            self._say("response.in_progress", response=self._response)

    def _add_item(self, item: Json) -> None:
        self._begin()
        self._output.append(item)
        self._say("response.output_item.added", output_index=self._last, item=item)

    @property
    def _last(self) -> int:
        return len(self._output) - 1

    def _place(self) -> Json:
        return {"item_id": self._output[-1]["id"], "output_index": self._last}

    def _add_text(self, text: str, kind: "_TextItem") -> None:
        if self._open is not kind:
            self._end_text()
            self._open = kind
            item_id = f"{kind.prefix}_{self.request_id}_{len(self._output)}"
            self._add_item(kind.item(item_id, "in_progress", []))
            part = kind.part("")
            self._say("response.content_part.added", **self._place(), content_index=0, part=part)
        self._text.append(text)
        said = {"content_index": 0, "delta": text, **kind.extra}
        self._say(f"response.{kind.text}.delta", **self._place(), **said)

    def _end_text(self, status: str = "completed") -> None:
        if (kind := self._open) is None:
            return
        text, place = "".join(self._text), self._place()
        self._text, self._open = [], None
        done = {**place, "content_index": 0}
        self._say(f"response.{kind.text}.done", **done, text=text, **kind.extra)
        self._say("response.content_part.done", **done, part=kind.part(text))
        self._output[-1] = kind.item(place["item_id"], status, [kind.part(text)])
        self._say("response.output_item.done", output_index=self._last, item=self._output[-1])

    def _add_call(self, call: pb.ToolCall) -> None:
        self._end_text()
        item_id = f"fc_{self.request_id}_{len(self._output)}"
        named = {"id": item_id, "type": "function_call", "call_id": call.id, "name": call.name}
        self._add_item({**named, "arguments": "", "status": "in_progress"})
        place, arguments = self._place(), call.arguments
        self._say("response.function_call_arguments.delta", **place, delta=arguments)
        self._say(
            "response.function_call_arguments.done", **place, name=call.name, arguments=arguments
        )
        self._output[-1] = {**named, "arguments": arguments, "status": "completed"}
        self._say("response.output_item.done", output_index=self._last, item=self._output[-1])

    def _finish(self, finished: pb.Finished) -> None:
        reason = _INCOMPLETE.get(finished.reason)
        status = "completed" if reason is None else "incomplete"
        self._begin()
        self._end_text(status)
        self._model = finished.model or self._model
        details = None if reason is None else {"reason": reason}
        self._end = {
            "status": status,
            "incomplete_details": details,
            "usage": _usage(finished.usage),
        }
        self._say(f"response.{status}", response=self._response)


@dataclass(frozen=True)
class _TextItem:
    """An item of the output that is text.

    Attributes:
        text: the type of its part.
        fields: of the item, beside those that all have.
        of_part: the same of the part.
        extra: of the events of its text.
    """

    prefix: str
    type: str
    text: str
    fields: Mapping[str, Any]
    of_part: Mapping[str, Any]
    extra: Mapping[str, Any]

    def item(self, item_id: str, status: str, content: list[Json]) -> Json:
        named = {"id": item_id, "type": self.type, **self.fields}
        return {**named, "status": status, "content": content}

    def part(self, text: str) -> Json:
        return {"type": self.text, "text": text, **self.of_part}


_MESSAGE: Final = _TextItem(
    *("msg", "message", "output_text", {"role": "assistant"}),
    of_part={"annotations": [], "logprobs": []},
    extra={"logprobs": []},
)
_REASONING: Final = _TextItem("rs", "reasoning", "reasoning_text", {"summary": []}, {}, {})


def _usage(usage: pb.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_prompt_tokens,
            "cache_write_tokens": 0,  # nothing is charged for what is kept
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
