"""Separate tool calls and reasoning from the text in the messages of an answer, and filter what is assembled."""

import json
import re
from collections.abc import Callable
from typing import Final

from gateway.models.tokenizer import ModelTokenizer
from gateway.models.tool_events import Parsed, ToolCallParser
from gateway.models.tools import ToolUse, map_texts
from gateway.safety.output.redactor import AssembledFilter
from sluice.v1 import inference_pb2 as pb
from sluice.wire.text_tokens import REASONING, REASONING_END

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
