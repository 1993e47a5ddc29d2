"""Holds tokens back until all of their text is decided, so that ids never tell what the text does not.

A token goes out when the output filter has decided about every character of it; the tokens of one character go out
together. A token of which any character does not show goes out as `HIDDEN_TOKEN_ID`, so that indexes stay.
"""

from collections import deque
from typing import Final, Protocol

from sluice.defaults import HIDDEN_TOKEN_ID
from sluice.internal.v1.frame_pb2 import Logprobs

Token = tuple[int, Logprobs | None]
"""Id and log-probabilities of one token."""
_HIDDEN: Final[Token] = (HIDDEN_TOKEN_ID, None)


class Filter(Protocol):
    """Decides what of an answer shows. Offsets count characters of the answer as the model gave it."""

    @property
    def decided(self) -> int:
        """Characters about which nothing that comes can change anything."""

    @property
    def stopped(self) -> tuple[str, ...]:
        """Why the answer ends here: names of rules."""

    def push(self, text: str) -> str:
        """What may be shown after ``text`` came."""

    def finish(self, truncated: bool) -> str:
        """The rest; ``truncated``: the model did not end by itself."""

    def hides(self, start: int, end: int) -> bool:
        """Whether a decided character from ``start`` to ``end`` does not show; asked in order."""


class Gate:
    """The tokens of one answer that wait.

    Attributes:
        output: the filter of the answer.
    """

    def __init__(self, output: Filter) -> None:
        self.output = output
        self._whole: deque[tuple[Token, int, int]] = deque()
        """Tokens with the place of their text."""
        self._parts: list[Token] = []
        """Tokens whose character is not complete."""
        self._end = 0

    def push(self, token: Token, text: str) -> str:
        """``token`` has come and completed ``text``; returns what of the text may be shown."""
        self._parts.append(token)
        if not text:
            return ""
        self._complete(text)
        return self.output.push(text)

    def finish(self, text: str) -> None:
        """No token comes any more; ``text`` stands for what is no character."""
        self._complete(text)

    def ready(self) -> list[Token]:
        """The tokens that may go out."""
        return self._taken_to(self.output.decided)

    def rest(self) -> list[Token]:
        """All that wait, once the filter has finished."""
        return self._taken_to(self._end)

    def _taken_to(self, decided: int) -> list[Token]:
        taken, whole = [], self._whole
        while whole and whole[0][2] <= decided:
            token, start, end = whole.popleft()
            taken.append(_HIDDEN if self.output.hides(start, end) else token)
        return taken

    def _complete(self, text: str) -> None:
        start, self._end = self._end, self._end + len(text)
        for token in self._parts:
            self._whole.append((token, start, self._end))
        self._parts.clear()
