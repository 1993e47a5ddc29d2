"""Assign log-probabilities to text: of an answer that may have tool calls, and of a prompt that is repeated before it.

Tokens of an answer arrive before it is known whether they are text or a tool call. Their log-probabilities are pending
until text arrives that they match; those of calls, and of blanks around calls, are dropped.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.openai.answers import in_text, joined, text_logprobs
from sluice.v1.inference_pb2 import TokenLogprobs

Json = dict[str, Any]


class TextLogprobs:
    """The pending log-probabilities of one answer, in the order of its tokens."""

    def __init__(self) -> None:
        self._pending: deque[TokenLogprobs] = deque()
        self._text = ""
        """Text that has arrived and is not matched with entries yet."""

    def push(self, entries: Iterable[TokenLogprobs], text: str) -> list[TokenLogprobs]:
        """Add entries and text; return the entries that are matched with text now."""
        self._pending += filter(in_text, entries)
        self._text += text
        return list(self._take(is_last=False))

    def flush(self) -> list[TokenLogprobs]:
        """Return the entries of the remaining text, when no more will come."""
        return list(self._take(is_last=True))

    def _take(self, *, is_last: bool) -> Iterator[TokenLogprobs]:
        while (group := self._next()) and self._text:
            text = group[-1].text
            if not is_last and len(self._text) < len(text) and text.startswith(self._text):
                return  # the rest of the token's text may come
            for _ in group:
                self._pending.popleft()
            if self._text.startswith(text):
                self._text = self._text[len(text) :]
                yield from group
            elif text.startswith(self._text):  # the answer's trailing blanks are no text
                yield _cut(group[-1], self._text)
                self._text = ""

    def _next(self) -> list[TokenLogprobs]:
        """Return the next pending tokens up to the first that has text: together they are whole characters."""
        for index, entry in enumerate(self._pending):
            if entry.text:
                return [self._pending[index] for index in range(index + 1)]
        return []


def _cut(entry: TokenLogprobs, text: str) -> TokenLogprobs:
    cut = TokenLogprobs()
    cut.CopyFrom(entry)
    cut.text, cut.token_bytes = text, text.encode()
    return cut


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated before its answer in /v1/completions (`echo`).

    Attributes:
        text: Text of the prompt.
        tokens: Tokens of the prompt with their log-probabilities; empty if these are not asked for.
        unscored: Number of first tokens that have no log-probability.
    """

    text: str
    tokens: Sequence[TokenLogprobs] = ()
    unscored: int = 0

    def whole(self, text: str, entries: Sequence[TokenLogprobs]) -> Json:
        """Return text and log-probabilities of a choice: the prompt, then the answer `text`."""
        answer = self.answer(text, entries, len(self.text))
        logprobs = joined(self.prompt()["logprobs"], answer["logprobs"])
        return {"text": self.text + text, "logprobs": logprobs}

    def prompt(self) -> Json:
        """Return text and log-probabilities of the prompt alone."""
        logprobs = text_logprobs(self.tokens, self.text, 0, self.unscored) if self.tokens else None
        return {"text": self.text, "logprobs": logprobs}

    def answer(self, text: str, entries: Sequence[TokenLogprobs], offset: int) -> Json:
        """Return text and log-probabilities of a piece of the answer that begins `offset` characters into the choice.

        The token that ends the answer keeps its entry: readers of a prompt's log-probabilities count from the end.
        """
        return {"text": text, "logprobs": text_logprobs(entries, text, offset) if entries else None}
