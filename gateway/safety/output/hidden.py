"""Which characters of the model's answer a caller does not get to see, whoever took them out.

Rules report places of the answer itself. The echo guard comes behind them and reports places of what they left, so
these are carried back over the edits.
"""

from collections.abc import Sequence

from gateway.safety.output.automaton import UNBOUNDED
from gateway.safety.output.redactor import Redactor


class HiddenPlaces:
    """The hidden places of one answer."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._passed_edits = 0
        self._passed_echoes = 0

    def whole(self, offset: int) -> int:
        """The offset in the answer of character ``offset`` of what rules left, or one inside the same edit."""
        if offset == UNBOUNDED:
            return offset
        longer = 0
        for edit in self._redactor.edits:
            if edit.start - longer >= offset:
                break
            longer += edit.end - edit.start - len(edit.shown)
        return offset + longer

    def touch(self, start: int, end: int, echoes: Sequence[tuple[int, int]]) -> bool:
        """Whether a character from ``start`` to ``end`` of the answer is hidden; asked in order.

        Args:
            start: in the answer.
            end: the character behind the last one.
            echoes: places of what rules left that are hidden too.
        """
        if end > self._redactor.shown_to:
            return True
        edits = self._redactor.edits
        if not edits and not echoes:
            return False
        while self._passed_edits < len(edits) and edits[self._passed_edits].end <= start:
            self._passed_edits += 1
        if self._passed_edits < len(edits) and edits[self._passed_edits].start < end:
            return True
        return bool(echoes) and self._in_echo(start, end, echoes)

    def _in_echo(self, start: int, end: int, echoes: Sequence[tuple[int, int]]) -> bool:
        while self._passed_echoes < len(echoes):
            first, last = echoes[self._passed_echoes]
            if self.whole(last) > start:
                return self.whole(first) < end
            self._passed_echoes += 1
        return False
