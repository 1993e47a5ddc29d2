"""Log-probabilities of an answer that may have calls of tools, which are no part of its text.

Tokens arrive before it is known whether they are text or a call. Their log-probabilities wait for the text; those of
calls, and of blanks around calls, are dropped.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from sluice.openai.answers import in_text
from sluice.v1.inference_pb2 import TokenLogprobs


class TextLogprobs:
    """The entries of one answer, in the order of its tokens."""

    def __init__(self) -> None:
        self._waiting: deque[TokenLogprobs] = deque()
        self._text = ""
        """Text that came and whose entries have not been found."""

    def push(self, entries: Iterable[TokenLogprobs], text: str) -> list[TokenLogprobs]:
        """Return the entries of the text so far, less those returned before, after ``entries`` and ``text`` came."""
        self._waiting += filter(in_text, entries)
        self._text += text
        return list(self._take(is_last=False))

    def flush(self) -> list[TokenLogprobs]:
        """Return the entries of the rest, when no more text comes."""
        return list(self._take(is_last=True))

    def _take(self, *, is_last: bool) -> Iterator[TokenLogprobs]:
        while (group := self._next()) and self._text:
            text = group[-1].text
            if not is_last and len(self._text) < len(text) and text.startswith(self._text):
                return  # the rest may come
            for _ in group:
                self._waiting.popleft()
            if self._text.startswith(text):
                self._text = self._text[len(text) :]
                yield from group
            elif text.startswith(self._text):  # blanks behind it are no text
                yield _cut(group[-1], self._text)
                self._text = ""

    def _next(self) -> list[TokenLogprobs]:
        """Return the tokens that make up the next characters together."""
        for at, entry in enumerate(self._waiting):
            if entry.text:
                return [self._waiting[one] for one in range(at + 1)]
        return []


def _cut(entry: TokenLogprobs, text: str) -> TokenLogprobs:
    cut = TokenLogprobs()
    cut.CopyFrom(entry)
    cut.text, cut.token_bytes = text, text.encode()
    return cut
