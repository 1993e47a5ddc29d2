"""Which parts of an answer token classifiers read, and up to where its entities are known.

An answer is read in windows, one after the other. A window goes to the end of a sentence, or to the last blank among
its `window_tokens` tokens; an entity at such a cut is left to the next window, so that no part of a name is decided
before the whole. Each window is read with some of the text before it. Where windows begin and end follows from text and
findings alone, not from how the tokens arrived: a resumed call finds the same.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from gateway.safety.actions import clusters
from gateway.safety.findings import Finding

CONTEXT_CHARS: Final = 200
"""Text before a window that is read with it."""
_SENTENCE_MIN: Final = 24
"""Shorter sentences share a window."""
_SENTENCE_END: Final = re.compile(
    r"""(?:[!?…]|(?:(?<=\w{4})|(?<=\b[a-z]{2})|(?<=\b[a-z]{3}))\.)["'”’»)\]]*\s|[。！？]|\n"""
)
"""Not behind a short word with a capital, which may be an initial or an abbreviation before a name."""


@dataclass(frozen=True)
class Window:
    """A part of an answer to read.

    Attributes:
        start: offset in the answer from which on it decides.
        text: the part, with the text before it.
        context: how many characters of ``text`` stand before ``start``.
        cut: it may end inside an entity.
    """

    start: int
    text: str
    context: int
    cut: bool

    @property
    def end(self) -> int:
        """Offset in the answer behind it."""
        return self.start + len(self.text) - self.context


class Windows:
    """The windows of one answer.

    Attributes:
        known_to: before this offset all entities are known.
    """

    def __init__(self, window_tokens: int) -> None:
        self.known_to = 0
        self._tokens_max = max(1, window_tokens)
        self._text = ""
        self._ends: list[int] = []
        """Where the tokens end that are not decided."""
        self._ended = False
        self._open: Window | None = None

    @property
    def unread(self) -> bool:
        """Whether entities may come in what the answer has so far."""
        return self.known_to < len(self._text)

    def push(self, text: str) -> None:
        """The answer goes on with ``text``, of one token or of several that only together are characters."""
        self._text += text
        self._ends.append(len(self._text))

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def due(self) -> Window | None:
        """The next window, if there is one to read now; `settle` comes before the next."""
        if self._open is not None or not self.unread:
            return None
        end, cut = self._next_end()
        if end is None:
            return None
        context = self._context_start()
        self._open = Window(self.known_to, self._text[context:end], self.known_to - context, cut)
        return self._open

    def settle(self, window: Window, findings: Iterable[Finding]) -> tuple[str, list[Finding]]:
        """The entities in ``window``, by offset in its text.

        Returns the text that is decided now, and the entities in it, by offset in the answer.
        """
        assert window is self._open, "one is read at a time"
        self._open = None
        begin = window.start - window.context
        found = [
            replace(one, start=max(begin + one.start, window.start), end=begin + one.end)
            for one in findings
            if begin + one.end > window.start
        ]
        self.known_to = known_to = _decided_to(window, found)
        self._ends = [end for end in self._ends if end > known_to]
        return self._text[window.start : known_to], [one for one in found if one.end <= known_to]

    def _next_end(self) -> tuple[int | None, bool]:
        """Where the next window ends, None: that is not known yet; and whether an entity may go on there."""
        start, text = self.known_to, self._text
        found = _SENTENCE_END.search(text, start + _SENTENCE_MIN)
        full = len(self._ends) >= self._tokens_max
        limit = self._ends[self._tokens_max - 1] if full else len(text)
        if found is not None and found.end() <= limit:
            return found.end(), False
        if not full:
            return (len(text), False) if self._ended else (None, False)
        blank = max(text.rfind(" ", start, limit), text.rfind("\n", start, limit)) + 1
        return (blank if blank > start else limit), True

    def _context_start(self) -> int:
        start = max(0, self.known_to - CONTEXT_CHARS)
        blank = self._text.find(" ", start, self.known_to)
        return start if start == 0 or blank < 0 else blank + 1


def _decided_to(window: Window, found: list[Finding]) -> int:
    """The end of ``window``, or the start of the entity that may go on behind it."""
    last = max(found, key=lambda one: one.end, default=None)
    if not window.cut or last is None:
        return window.end
    behind = window.text[last.end - window.start + window.context :]
    # One that fills the window is decided: text is not held without end.
    start = next(s for s, e in clusters((one.start, one.end) for one in found) if e == last.end)
    goes_on = start > window.start and not any(map(str.isalnum, behind))
    return start if goes_on else window.end
