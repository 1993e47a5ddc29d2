"""Finds stop strings in text that arrives in pieces, and holds back only what may become one.

The stop string whose last character comes first ends the answer; of two that end together the longer one. That
depends on the text alone, never on how it was cut into pieces.
"""

from collections.abc import Sequence


class StopMatcher:
    """Releases text up to the first stop string.

    Attributes:
        found: the stop string that ended the text, once there is one; nothing is released after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What may be shown after ``text`` came."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, self.found = match
            self._held = ""
            return text[:start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        ends = []
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
