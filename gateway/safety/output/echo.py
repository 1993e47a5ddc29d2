"""Finds repetitions of the system message in an answer, by runs of equal words.

Words are compared without case, spaces and punctuation. A run shorter than `WORDS` does
not count, so only the word that would complete one is held back. In scripts without
spaces each character counts as a word. A finding covers the words that complete a run; those that
continue it belong to the same finding.

An answer is followed in the readings of `gateway.safety.output.view`: a word counts as its reader
sees it, without invisible characters and terminal sequences, and decoded from JSON.
"""

import re
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from gateway.safety.findings import Finding, Severity
from gateway.safety.output.view import Place, ReadingsWatch, seen_as, view
from gateway.safety.text.characters import UNSPACED

RULE: Final = "output.system_echo"
SEVERITY: Final = Severity.HIGH
WORDS: Final = 8
"""Length of a repetition that counts, in words in a row."""
_WORD: Final = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
_ONE_ALONE: Final = re.compile(rf"[{UNSPACED}]")
_WORD_CHARS_MAX: Final = 64
"""Longest word of a repetition, in characters."""


@dataclass(slots=True, eq=False)
class _EchoPlace(Place):
    """The words of one reading of an answer.

    Attributes:
        last: complete words that a run may begin with.
        word: the incomplete word, cut when it is too long; it spans `start` to `end`.
        repeated_from: start of the finding that the next word may continue; else -1.
    """

    last: tuple[str, ...] = ()
    word: str = ""
    start: int = 0
    end: int = 0
    repeated_from: int = -1


class EchoWatch(ReadingsWatch[_EchoPlace]):
    """Repetitions of the system message in one answer.

    Attributes:
        runs: runs of words of the system message.
        findings: findings in the answer so far.
    """

    def __init__(self, system: str, *, stops: bool, words: int = WORDS) -> None:
        """Look for `words` words of `system` in a row; `stops`: the first finding ends the answer."""
        super().__init__(_EchoPlace(None))
        own = list(map(_plain, _WORD.findall(view(system).text)))
        runs = (tuple(own[at : at + words]) for at in range(len(own) - words + 1))
        self.runs = frozenset(filter(all, runs))
        self._beginnings = frozenset(run[:-1] for run in self.runs)
        self._words = words
        self._stops = stops
        self.findings: dict[Finding, None] = {}

    def feed(self, text: str) -> list[Finding]:
        """Follow `text`, and return what it completes."""
        count = len(self.findings)
        self._follow(text)
        return list(self.findings)[count:]

    def finish(self) -> list[Finding]:
        """Return what is found when no more text comes."""
        count = len(self.findings)
        for place in (self.view, *self.further):
            self._complete(place)
        return list(self.findings)[count:]

    @property
    def free_to(self) -> int:
        """Offset up to which the text is decided."""
        return min(map(self._free_to, (self.view, *self.further)))

    def _free_to(self, place: _EchoPlace) -> int:
        is_near = place.last[1 - self._words :] in self._beginnings
        if not is_near or len(place.word) > _WORD_CHARS_MAX:
            return self.end
        # The words of one finding are decided together, unless the first ends the answer.
        if place.repeated_from >= 0 and not self._stops:
            return place.repeated_from
        return place.start if place.word else self.begun_at(place)

    @override
    def _state(self, place: _EchoPlace) -> object:
        return place.last, place.word, place.start, place.end, place.repeated_from

    @override
    def _step(self, place: _EchoPlace, char: str, width: int) -> None:
        char = seen_as(char)
        if not char:
            return
        is_alone = _ONE_ALONE.match(char) is not None
        if is_alone or not _WORD.match(char):
            self._complete(place)
        if _WORD.match(char):
            if not place.word:
                place.start = self.end + 1 - width
            place.word = (place.word + char)[: _WORD_CHARS_MAX + 1]
            place.end = self.end + 1
        if is_alone:
            self._complete(place)

    def _complete(self, place: _EchoPlace) -> None:
        """Take the word as complete."""
        if not place.word:
            return
        place.last, place.word = (*place.last, _plain(place.word))[-self._words :], ""
        if place.last not in self.runs:
            place.repeated_from = -1
            return
        if place.repeated_from < 0:
            place.repeated_from = place.start
        self.findings[Finding(RULE, place.repeated_from, place.end, SEVERITY)] = None


def _plain(word: str) -> str:
    return word.casefold() if len(word) <= _WORD_CHARS_MAX else ""
