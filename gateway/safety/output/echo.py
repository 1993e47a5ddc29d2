"""Finds repetitions of the system message in an answer, by runs of equal words.

Words are compared without case, spaces and punctuation. A run shorter than the policy's number of words does not
count, so only the word that would complete one is held back. In scripts without spaces each character counts as a
word.

An answer is followed in the readings of `gateway.safety.output.view`: a word counts as its reader sees it, without
invisible characters and terminal sequences, and decoded from JSON. A word that completes a run in several readings
counts once.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.safety.actions import Action
from gateway.safety.output.automaton import UNBOUNDED
from gateway.safety.output.view import APART, APART_CHARS, KINDS, TextReader, seen_as, view
from gateway.safety.rules.spec import Span
from gateway.safety.settings import EchoSettings
from gateway.safety.text.characters import UNSPACED

RULE: Final = "output.system_echo"
PLACEHOLDER: Final = "<SYSTEM_PROMPT>"
_WORDS: Final = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
_ONE_ALONE: Final = re.compile(rf"[{UNSPACED}]")
_WORD_CHARS_MAX: Final = 64
"""Longer words are no part of a repetition."""


@dataclass
class _Words:
    """The words of one reading of an answer.

    Attributes:
        reader: what it reads; None: the view.
        last: complete words that a run may begin with.
        is_near: whether the next word may complete a run.
        word: the word under way, cut when it is too long; it stands from ``start`` to ``end``.
        omitted_to: where the last word ends, if it is omitted; else -1.
    """

    reader: TextReader | None = None
    last: tuple[str, ...] = ()
    is_near: bool = False
    word: str = ""
    start: int = 0
    end: int = 0
    omitted_to: int = -1

    def agrees_with(self, other: "_Words") -> bool:
        """Return whether both go on alike, whatever follows."""
        same = replace(self, reader=None) == replace(other, reader=None)
        return same and (self.reader is None or not self.reader.is_inside)

    def hold_from(self, end: int) -> int:
        """Return from where on text waits that is read up to ``end``."""
        if not self.is_near or len(self.word) > _WORD_CHARS_MAX:
            return end
        if self.omitted_to >= 0:
            return self.omitted_to
        begun = 0 if self.reader is None else self.reader.begun
        return self.start if self.word else end - begun

    def split(
        self, text: str, starts: Sequence[int], ends: Sequence[int]
    ) -> Iterator[tuple[str, int, int]]:
        """Yield the words that ``text`` completes, each with its place; ``starts`` and ``ends``: of characters."""
        known, text, self.word = len(self.word), self.word + text, ""
        for match in _WORDS.finditer(text):
            first, behind = match.span()
            start = self.start if first < known else starts[first - known]
            end = self.end if behind <= known else ends[behind - known - 1]
            if behind == len(text) and not _ONE_ALONE.match(match[0]):
                self.word = match[0][: _WORD_CHARS_MAX + 1]
                self.start, self.end = start, end
            else:
                yield match[0], start, end


class EchoGuard:
    """Releases an answer without the parts that repeat the system message, in any of its readings.

    Attributes:
        stopped: the rule that ended the answer, when the action is to block.
        action: what is done.
        runs: those of the system message.
        matches: runs of words found.
        hidden: omitted spans, by offset in the input text; the last one has no end after a stop.
        taken: characters that are dealt with.
    """

    def __init__(self, system: str, words: int, matches: int, action: Action) -> None:
        """From the run number ``matches`` on, each of ``words`` words, ``action`` is done."""
        own = [_plain(match[0]) for match in _WORDS.finditer(view(system)[0])]
        runs = (tuple(own[i : i + words]) for i in range(len(own) - words + 1))
        self.runs = frozenset(filter(all, runs))
        self._beginnings = frozenset(run[:-1] for run in self.runs)
        self._words = words
        self._needed = matches
        self.action = action
        self._view = _Words()
        self._further: list[_Words] = []
        """Readings that differ from the view."""
        self._held = ""
        self._end = 0
        self._matched_to = 0
        self._omitted: list[Span] = []
        """Spans of what is held, in order."""
        self.stopped: tuple[str, ...] = ()
        self.matches = 0
        self.hidden: list[Span] = []
        self._hidden_to = -1
        self.taken = 0

    @property
    def holds(self) -> bool:
        """Whether text waits."""
        return bool(self._held)

    def push(self, text: str) -> str:
        """What may be shown after ``text`` came."""
        if self.stopped:
            return ""
        self._held += text
        self._follow(text)
        to = self._view.hold_from(self._end)
        for one in self._further:
            to = min(to, one.hold_from(self._end))
        return self._release(to)

    def finish(self) -> str:
        """The rest, when no more text comes."""
        for one in (self._view, *self._further):
            if one.word:
                self._complete(one, one.word, one.start, one.end)
        return self._release(self._end)

    def _follow(self, text: str) -> None:
        """Follow ``text`` in the view as far as all readings are alike, else character by character."""
        at = 0
        while at < len(text) and not self.stopped:
            if self._further or text[at] in APART_CHARS:
                self._follow_char(text[at])
                at += 1
                continue
            apart = APART.search(text, at)
            to = len(text) if apart is None else apart.start()
            self._follow_alike(text[at:to])
            at = to

    def _follow_alike(self, text: str) -> None:
        """Follow ``text``, which all readings have alike."""
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
        for one in self._further:
            assert one.reader is not None, "the view is not among them"
            taken, width = one.reader.take(char)
            if taken:
                self._read(one, seen_as(taken), (self._end - width,), ends)
        self._further = [one for one in self._further if not one.agrees_with(self._view)]

    def _fork(self, char: str) -> None:
        """Begin the readings that may differ from here on; they have come as far as the view."""
        known = [one.reader.kind for one in self._further if one.reader is not None]
        self._further += [
            replace(self._view, reader=TextReader(kind))
            for kind in KINDS
            if kind not in known and (kind.decodes or char != "\\")
        ]

    def _read(self, one: _Words, text: str, starts: Sequence[int], ends: Sequence[int]) -> None:
        for word, start, end in one.split(text, starts, ends):
            self._complete(one, word, start, end)

    def _complete(self, one: _Words, word: str, start: int, end: int) -> None:
        """Take a complete word; omit it, or stop, where it completes a run about which something is done."""
        if self.stopped:
            return
        last = (*one.last, _plain(word))
        is_run = last in self.runs
        one.last = last[1 - self._words :] if len(last) >= self._words else last
        one.is_near = one.last in self._beginnings
        if is_run and start >= self._matched_to:  # not yet in another reading
            self.matches += 1
            self._matched_to = end
        if not is_run or self.matches < self._needed:
            one.omitted_to = -1
        elif self.action is not Action.BLOCK:
            self._omit(start if one.omitted_to < 0 else one.omitted_to, end)
            one.omitted_to = end
        else:
            self.stopped = (RULE,)
            self._omitted = [(start, UNBOUNDED)]

    def _omit(self, start: int, end: int) -> None:
        """Omit what stands from ``start`` to ``end``, together with what overlaps it."""
        apart = [one for one in self._omitted if one[1] <= start or one[0] >= end]
        joined = [(start, end), *(one for one in self._omitted if one not in apart)]
        union = min(one[0] for one in joined), max(one[1] for one in joined)
        self._omitted = sorted((*apart, union))

    def _release(self, to: int) -> str:
        """Show what stands before ``to``, without what is omitted."""
        if not self._omitted and to == self._end:
            shown_all, self._held, self.taken = self._held, "", to
            return shown_all
        to = next((start for start, end in self._omitted if start < to < end), to)
        shown, begin, at = list[str](), self.taken, self.taken
        for start, end in self._omitted:
            if start >= to and not self.stopped:
                break
            shown.append(self._held[at - begin : start - begin])
            if self.action is Action.REDACT and start != self._hidden_to:
                shown.append(PLACEHOLDER)
            self.hidden.append((start, end))
            self._hidden_to = at = end
        self._omitted = [one for one in self._omitted if one[0] >= to]
        if self.stopped:
            self._end = to = begin + len(self._held)
            self._held, self._omitted = "", []
        else:
            shown.append(self._held[at - begin : to - begin])
            self._held = self._held[to - begin :]
        self.taken = to
        return "".join(shown)


def _plain(word: str) -> str:
    return word.casefold() if len(word) <= _WORD_CHARS_MAX else ""


def echo_guard(settings: EchoSettings | None, system: str) -> EchoGuard | None:
    """The guard of an answer; None where nothing is to be done."""
    if settings is None or settings.action == "allow":
        return None
    action = Action[settings.action.upper()]
    guard = EchoGuard(system, settings.words, settings.matches, action)
    return guard if guard.runs else None
