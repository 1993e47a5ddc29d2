"""The parts of an answer that token classifiers read, and up to where its entities are known.

An answer is read in windows, one after the other. A window goes to the end of a sentence, or to the
last blank among its `window_tokens` tokens; an entity at such a cut is left to the next window, so
that no part of a name is decided before the whole. Each window is read with some of the text before
it. Windows depend on tokens and findings alone, not on when the tokens arrived: a resumed call
finds the same.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from gateway.safety.findings import Finding, clusters

CONTEXT_CHARS: Final = 200
"""Length of the text before a window that is read with it, in characters."""
_SENTENCE_MIN: Final = 24
"""Shorter sentences share a window, in characters."""
_SENTENCE_END: Final = re.compile(
    r"""(?:[!?…]|(?:(?<=\w{4})|(?<=\b[a-z]{2})|(?<=\b[a-z]{3}))\.)["'”’»)\]]*\s|[。！？]|\n"""
)
"""End of a sentence; not behind a short word with a capital, which may be an initial or an
abbreviation before a name.
"""


@dataclass(frozen=True)
class AnswerWindow:
    """A part of an answer to read.

    Attributes:
        start: offset in the answer from which on it decides.
        text: the part, with the text before it.
        context: number of characters of `text` before `start`.
        cut: whether it may end inside an entity.
    """

    start: int
    text: str
    context: int
    cut: bool

    @property
    def end(self) -> int:
        """Offset in the answer behind the window."""
        return self.start + len(self.text) - self.context


class AnswerWindows:
    """The windows of one answer.

    Attributes:
        known_to: offset before which all entities are known.
    """

    def __init__(self, window_tokens: int) -> None:
        self.known_to = 0
        self._tokens_max = max(1, window_tokens)
        self._text = ""
        self._ends: list[int] = []
        """Ends of the tokens that are not decided."""
        self._ended = False
        self._reading: AnswerWindow | None = None

    @property
    def unread(self) -> bool:
        """Whether the answer so far may have more entities."""
        return self.known_to < len(self._text)

    def push(self, text: str) -> None:
        """Append `text`, of one token or of several that are characters only together."""
        self._text += text
        self._ends.append(len(self._text))

    def end(self) -> None:
        """Note that no more text comes."""
        self._ended = True

    def due(self) -> AnswerWindow | None:
        """Return the next window, if there is one to read now; `settle` comes before the next."""
        # Windows are read in order, because each begins where the last one was decided.
        if self._reading is not None or not self.unread:
            return None
        end, cut = self._next_end()
        if end is None:
            return None
        context = self._context_start()
        self._reading = AnswerWindow(
            self.known_to, self._text[context:end], self.known_to - context, cut
        )
        return self._reading

    def settle(
        self, window: AnswerWindow, findings: Iterable[Finding]
    ) -> tuple[str, list[Finding]]:
        """Take the entities in `window`, with offsets in its text.

        Returns:
            The text that is decided now, and its entities by offset in the answer.
        """
        assert window is self._reading, "one is read at a time"
        self._reading = None
        begin = window.start - window.context
        entities = [
            replace(f, start=max(begin + f.start, window.start), end=begin + f.end)
            for f in findings
            if begin + f.end > window.start
        ]
        self.known_to = known_to = _decided_to(window, entities)
        self._ends = [end for end in self._ends if end > known_to]
        decided = [entity for entity in entities if entity.end <= known_to]
        return self._text[window.start : known_to], decided

    def _next_end(self) -> tuple[int | None, bool]:
        """Return the end of the next window (None: not known yet), and whether an entity may continue there."""
        start, text = self.known_to, self._text
        sentence = _SENTENCE_END.search(text, start + _SENTENCE_MIN)
        full = len(self._ends) >= self._tokens_max
        limit = self._ends[self._tokens_max - 1] if full else len(text)
        if sentence is not None and sentence.end() <= limit:
            return sentence.end(), False
        # Without a sentence end or a full window, wait for more text.
        if not full:
            return (len(text), False) if self._ended else (None, False)
        # Cut at a blank, so that no word is split; the entity there is left to the next window.
        blank = max(text.rfind(" ", start, limit), text.rfind("\n", start, limit)) + 1
        return (blank if blank > start else limit), True

    def _context_start(self) -> int:
        start = max(0, self.known_to - CONTEXT_CHARS)
        blank = self._text.find(" ", start, self.known_to)
        return start if start == 0 or blank < 0 else blank + 1


def _decided_to(window: AnswerWindow, entities: list[Finding]) -> int:
    """Return the end of `window`, or the start of the entity that may continue behind it."""
    last = max(entities, key=lambda entity: entity.end, default=None)
    if not window.cut or last is None:
        return window.end
    behind = window.text[last.end - window.start + window.context :]
    # An entity that fills the window is decided: text does not wait without end.
    unions = clusters(entity.span for entity in entities)
    start = next(start for start, end in unions if end == last.end)
    goes_on = start > window.start and not any(map(str.isalnum, behind))
    return start if goes_on else window.end
