"""Turn an answer into a message of Anthropic's API: the whole object, or the events of a stream."""

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
"""Type of a block by kind of text; the block has its text in a field of the same name."""
_SIGNED: Final = {REASONING: {"signature": ""}}
"""Other fields of blocks, by kind of text: clients expect a signature, and send it back."""


class MessageEvents(EventAnswer):
    """The message of one answer."""

    def __init__(self, max_tokens: int, *, streams: bool, caches: bool) -> None:
        """Create the message.

        Args:
            max_tokens: The limit of the request.
            streams: Whether to write events.
            caches: Whether the request asks for prompt caching, so that cached tokens are counted separately.
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
        ending = {
            "stop_reason": self._reason(finished),
            "stop_sequence": finished.stop or None,
            "stop_details": _details(finished),
        }
        usage = self._usage(finished.usage)
        self._whole |= {"model": self.model, "content": self._content, **ending, "usage": usage}
        self._send_event("message_delta", delta=ending, usage=usage)
        self._send_event("message_stop")
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
            "cache_creation_input_tokens": 0,  # caching is not charged for
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }

    def _send_event(self, kind: str, **fields: Any) -> None:
        self._send(kind, {"type": kind, **fields})

    def _begin(self) -> None:
        """Start the message, unless it has begun; its id and model must be known."""
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
        self._send_event("message_start", message=self._whole)
        self._send_event("ping")

    def _begin_block(self, block: Json) -> None:
        self._begin()
        self._send_event("content_block_start", index=len(self._content), content_block=block)

    def _send_delta(self, kind: str, name: str, text: str) -> None:
        delta = {"type": f"{kind}_delta", name: text}
        self._send_event("content_block_delta", index=len(self._content), delta=delta)

    def _end_block(self, block: Json) -> None:
        self._send_event("content_block_stop", index=len(self._content))
        self._content.append(block)

    @override
    def _begin_text(self, kind: str) -> None:
        self._begin_block(_text_block(kind, ""))

    @override
    def _send_text(self, kind: str, text: str) -> None:
        self._send_delta(_BLOCKS[kind], _BLOCKS[kind], text)

    @override
    def _close_text(self, kind: str, text: str) -> None:
        self._end_block(_text_block(kind, text))

    @override
    def _add_call(self, call: pb.ToolCall) -> None:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._begin_block(block)
        self._send_delta("input_json", "partial_json", call.arguments)
        self._end_block({**block, "input": load_json(call.arguments or "{}")})


def _text_block(kind: str, text: str) -> Json:
    return {"type": _BLOCKS[kind], _BLOCKS[kind]: text, **_SIGNED.get(kind, {})}


def _details(finished: pb.Finished) -> Json | None:
    if finished.reason != pb.FINISH_REASON_CONTENT_FILTER:
        return None
    rules = ", ".join(finished.rules)
    explanation = f"the safety policy ended the answer: {rules}" if rules else None
    return {"type": "refusal", "category": None, "explanation": explanation}
