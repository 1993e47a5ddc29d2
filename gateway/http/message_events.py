"""The events of an answer become a message of Anthropic's API: the whole object, or the events of a stream."""

from typing import Any, Final

from typing_extensions import override

from gateway.http.events import REASONING, TEXT, EventAnswer, Json
from sluice.openai.fields import load_json
from sluice.v1 import inference_pb2 as pb

_REASONS: Final = {
    pb.FINISH_REASON_LENGTH: "max_tokens",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop_sequence",
    pb.FINISH_REASON_CONTENT_FILTER: "refusal",
    pb.FINISH_REASON_TOOL_CALLS: "tool_use",
}
_CONTEXT_FULL: Final = "model_context_window_exceeded"
_BLOCKS: Final = {TEXT: "text", REASONING: "thinking"}
"""Type of a block by kind of text; its text stands in a field of that name."""
_SIGNED: Final = {REASONING: {"signature": ""}}
"""What blocks have beside: clients expect the field, and send it back."""


class MessageEvents(EventAnswer):
    """Build one message."""

    def __init__(self, max_tokens: int, *, streams: bool, caches: bool) -> None:
        """Make the message.

        Args:
            max_tokens: of the request.
            streams: whether it is sent as events.
            caches: whether the request asks for a cache, so that what was read from it counts apart.
        """
        super().__init__(streams=streams)
        self._max_tokens = max_tokens
        self._caches = caches
        self._content: list[Json] = []
        self._started = pb.Usage()
        self._has_begun = False

    @override
    def take(self, response: pb.GenerateResponse) -> bytes:
        if response.HasField("started"):
            self._started.prompt_tokens = response.started.prompt_tokens
        return super().take(response)

    @override
    def finish(self, index: int, finished: pb.Finished) -> bytes:
        self._begin()
        self._end_text()
        self.model = finished.model or self.model
        ended = {
            "stop_reason": self._reason(finished),
            "stop_sequence": finished.stop or None,
            "stop_details": _details(finished),
        }
        usage = self._usage(finished.usage)
        self._whole |= {"model": self.model, "content": self._content, **ended, "usage": usage}
        self._say("message_delta", delta=ended, usage=usage)
        self._say("message_stop")
        return self._take_events()

    def _reason(self, finished: pb.Finished) -> str:
        if (
            finished.reason == pb.FINISH_REASON_LENGTH
            and finished.usage.completion_tokens < self._max_tokens
        ):
            return _CONTEXT_FULL
        return _REASONS.get(finished.reason, "end_turn")

    def _usage(self, usage: pb.Usage) -> Json:
        cached = usage.cached_prompt_tokens if self._caches else 0
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,  # nothing is charged for what is kept
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }

    def _say(self, kind: str, **fields: Any) -> None:
        self._send(kind, {"type": kind, **fields})

    def _begin(self) -> None:
        """Start the message, once it is known whose it is."""
        if self._has_begun:
            return
        self._has_begun = True
        self._whole = {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(self._started),
            **self.facts(),
        }
        self._say("message_start", message=self._whole)
        self._say("ping")

    def _begin_block(self, block: Json) -> None:
        self._begin()
        self._say("content_block_start", index=len(self._content), content_block=block)

    def _say_delta(self, kind: str, name: str, text: str) -> None:
        delta = {"type": f"{kind}_delta", name: text}
        self._say("content_block_delta", index=len(self._content), delta=delta)

    def _end_block(self, block: Json) -> None:
        self._say("content_block_stop", index=len(self._content))
        self._content.append(block)

    @override
    def _begin_text(self, kind: str) -> None:
        self._begin_block(_text_block(kind, ""))

    @override
    def _send_text(self, kind: str, text: str) -> None:
        self._say_delta(_BLOCKS[kind], _BLOCKS[kind], text)

    @override
    def _close_text(self, kind: str, text: str) -> None:
        self._end_block(_text_block(kind, text))

    @override
    def _add_call(self, call: pb.ToolCall) -> None:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._begin_block(block)
        self._say_delta("input_json", "partial_json", call.arguments)
        self._end_block({**block, "input": load_json(call.arguments or "{}")})


def _text_block(kind: str, text: str) -> Json:
    return {"type": _BLOCKS[kind], _BLOCKS[kind]: text, **_SIGNED.get(kind, {})}


def _details(finished: pb.Finished) -> Json | None:
    if finished.reason != pb.FINISH_REASON_CONTENT_FILTER:
        return None
    rules = ", ".join(finished.rules)
    why = f"the safety policy ended the answer: {rules}" if rules else None
    return {"type": "refusal", "category": None, "explanation": why}
