"""Finds repetitions of the system message in an answer, by runs of equal words.

Words are compared without case, spaces and punctuation. A run shorter than `WORDS` does
not count, so only the word that would complete one is held back. In scripts without
spaces each character counts as a word.

An answer is followed in the readings of `gateway.safety.output.view`: a word counts as its reader
sees it, without invisible characters and terminal sequences, and decoded from JSON. A word that
completes a run in several readings counts once.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.safety.actions import Action
from gateway.safety.output.automaton import UNBOUNDED
from gateway.safety.output.view import APART, APART_CHARS, KINDS, TextReader, seen_as, view
from gateway.safety.rules.spec import Span
from gateway.safety.text.characters import UNSPACED

RULE: Final = "output.system_echo"
PLACEHOLDER: Final = "<SYSTEM_PROMPT>"
_WORDS: Final = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
_ONE_ALONE: Final = re.compile(rf"[{UNSPACED}]")
WORDS: Final = 8
"""Length of a repetition that counts, in words in a row."""
_WORD_CHARS_MAX: Final = 64
"""Longest word of a repetition, in characters."""


@dataclass
class _EchoReading:
    """The words of one reading of an answer.

    Attributes:
        reader: reads the text; None for the view.
        last: complete words that a run may begin with.
        is_near: whether the next word may complete a run.
        word: the incomplete word, cut when it is too long; it spans `start` to `end`.
        omitted_to: end of the last word, if it is omitted; else -1.
    """

    reader: TextReader | None = None
    last: tuple[str, ...] = ()
    is_near: bool = False
    word: str = ""
    start: int = 0
    end: int = 0
    omitted_to: int = -1

    def agrees_with(self, other: "_EchoReading") -> bool:
        """Return whether both readings continue alike, whatever follows."""
        same = replace(self, reader=None) == replace(other, reader=None)
        return same and (self.reader is None or not self.reader.is_inside)

    def hold_from(self, end: int) -> int:
        """Return the offset from which on text waits, when it is read up to `end`."""
        if not self.is_near or len(self.word) > _WORD_CHARS_MAX:
            return end
        if self.omitted_to >= 0:
            return self.omitted_to
        begun = 0 if self.reader is None else self.reader.begun
        return self.start if self.word else end - begun

    def split(
        self, text: str, starts: Sequence[int], ends: Sequence[int]
    ) -> Iterator[tuple[str, int, int]]:
        """Yield the words that `text` completes, each with its place; `starts` and `ends` are those of characters."""
        begun, text, self.word = len(self.word), self.word + text, ""
        for match in _WORDS.finditer(text):
            first, behind = match.span()
            start = self.start if first < begun else starts[first - begun]
            end = self.end if behind <= begun else ends[behind - begun - 1]
            if behind == len(text) and not _ONE_ALONE.match(match[0]):
                self.word = match[0][: _WORD_CHARS_MAX + 1]
                self.start, self.end = start, end
            else:
                yield match[0], start, end


class EchoGuard:
    """Releases an answer without the parts that repeat the system message, in any of its readings.

    Attributes:
        stopped: the rule that ended the answer, if the action is to block.
        action: action on repetitions.
        runs: runs of words of the system message.
        matches: number of runs found.
        hidden: omitted spans, by offset in the input text; the last one has no end after a stop.
        taken: number of characters that are dealt with.
        further: readings that differ from the view.
    """

    def __init__(self, system: str, action: Action, words: int = WORDS) -> None:
        """Take `action` on `words` words in a row; with ALLOW or FLAG there is nothing to do."""
        own = [_plain(match[0]) for match in _WORDS.finditer(view(system)[0])]
        runs = (tuple(own[i : i + words]) for i in range(len(own) - words + 1))
        self.runs = frozenset(filter(all, runs) if action > Action.ROUTE else ())
        self._beginnings = frozenset(run[:-1] for run in self.runs)
        self._words = words
        self.action = action
        self._view = _EchoReading()
        self.further: list[_EchoReading] = []
        self._pending = ""
        self._end = 0
        self._matched_to = 0
        self._omitted: list[Span] = []
        """Spans of the pending text, in order."""
        self.stopped: tuple[str, ...] = ()
        self.matches = 0
        self.hidden: list[Span] = []
        self._hidden_to = -1
        self.taken = 0

    @property
    def holds(self) -> bool:
        """Whether text waits."""
        return bool(self._pending)

    def push(self, text: str) -> str:
        """Return what may be shown after `text` came."""
        if self.stopped:
            return ""
        self._pending += text
        self._follow(text)
        to = self._view.hold_from(self._end)
        for reading in self.further:
            to = min(to, reading.hold_from(self._end))
        return self._release(to)

    def finish(self) -> str:
        """Return the rest, when no more text comes."""
        for reading in (self._view, *self.further):
            if reading.word:
                self._complete(reading, reading.word, reading.start, reading.end)
        return self._release(self._end)

    def _follow(self, text: str) -> None:
        """Follow `text` in the view as far as all readings are alike, else character by character."""
        at = 0
        while at < len(text) and not self.stopped:
            if self.further or text[at] in APART_CHARS:
                self._follow_char(text[at])
                at += 1
                continue
            apart = APART.search(text, at)
            to = len(text) if apart is None else apart.start()
            self._follow_alike(text[at:to])
            at = to

    def _follow_alike(self, text: str) -> None:
        """Follow `text`, which all readings have alike."""
        begin = self._end
        self._end = end = begin + len(text)
        starts: Sequence[int] = range(begin, end)
        ends: Sequence[int] = range(begin + 1, end + 1)
        if not text.isascii():
            text, offsets = view(text)
            starts = [begin + offset for offset in offsets]
            ends = [start + 1 for start in starts]
        self._read(self._view, text, starts, ends)

    def _follow_char(self, char: str) -> None:
        if char in APART_CHARS:
            self._fork(char)
        self._end += 1
        ends = (self._end,)
        self._read(self._view, seen_as(char), (self._end - 1,), ends)
        for reading in self.further:
            assert reading.reader is not None, "the view is not among them"
            read, width = reading.reader.take(char)
            if read:
                self._read(reading, seen_as(read), (self._end - width,), ends)
        self.further = [reading for reading in self.further if not reading.agrees_with(self._view)]

    def _fork(self, char: str) -> None:
        """Begin the readings that may differ from here on; they have come as far as the view."""
        kinds = [reading.reader.kind for reading in self.further if reading.reader is not None]
        self.further += [
            replace(self._view, reader=TextReader(kind))
            for kind in KINDS
            if kind not in kinds and (kind.decodes or char != "\\")
        ]

    def _read(
        self, reading: _EchoReading, text: str, starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        for word, start, end in reading.split(text, starts, ends):
            self._complete(reading, word, start, end)

    def _complete(self, reading: _EchoReading, word: str, start: int, end: int) -> None:
        """Take a complete word; omit it, or stop, where it completes a run."""
        if self.stopped:
            return
        last = (*reading.last, _plain(word))
        is_run = last in self.runs
        reading.last = last[1 - self._words :] if len(last) >= self._words else last
        reading.is_near = reading.last in self._beginnings
        if is_run and start >= self._matched_to:  # not yet in another reading
            self.matches += 1
            self._matched_to = end
        if not is_run:
            reading.omitted_to = -1
        # Join the omission of the word before, so that a long repetition is one span.
        elif self.action is not Action.BLOCK:
            self._omit(start if reading.omitted_to < 0 else reading.omitted_to, end)
            reading.omitted_to = end
        else:
            self.stopped = (RULE,)
            self._omitted = [(start, UNBOUNDED)]

    def _omit(self, start: int, end: int) -> None:
        """Omit the span from `start` to `end`, together with those that overlap it."""
        apart = [span for span in self._omitted if span[1] <= start or span[0] >= end]
        joined = [(start, end), *(span for span in self._omitted if span not in apart)]
        union = min(span[0] for span in joined), max(span[1] for span in joined)
        self._omitted = sorted((*apart, union))

    def _release(self, to: int) -> str:
        """Return the text before `to`, without what is omitted."""
        if not self._omitted and to == self._end:
            shown_all, self._pending, self.taken = self._pending, "", to
            return shown_all
        # Never cut inside an omitted span.
        to = next((start for start, end in self._omitted if start < to < end), to)
        shown, begin, at = list[str](), self.taken, self.taken
        for start, end in self._omitted:
            if start >= to and not self.stopped:
                break
            shown.append(self._pending[at - begin : start - begin])
            if self.action is Action.REDACT and start != self._hidden_to:
                shown.append(PLACEHOLDER)
            self.hidden.append((start, end))
            self._hidden_to = at = end
        self._omitted = [span for span in self._omitted if span[0] >= to]
        if self.stopped:
            self._end = to = begin + len(self._pending)
            self._pending, self._omitted = "", []
        else:
            shown.append(self._pending[at - begin : to - begin])
            self._pending = self._pending[to - begin :]
        self.taken = to
        return "".join(shown)


def _plain(word: str) -> str:
    return word.casefold() if len(word) <= _WORD_CHARS_MAX else ""
