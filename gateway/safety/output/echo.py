"""Finds repetitions of the system message in an answer, by runs of equal words.

Words are compared without case, spaces and punctuation. A run shorter than the policy's number of words does not
count, so only the word that would complete one is held back. In scripts without spaces each character counts as a
word.
"""

import re
from typing import Final

from gateway.safety.actions import Action
from gateway.safety.output.automaton import UNBOUNDED
from gateway.safety.settings import EchoSettings
from gateway.safety.text.characters import UNSPACED

RULE: Final = "output.system_echo"
PLACEHOLDER: Final = "<SYSTEM_PROMPT>"
_WORDS: Final = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
_ONE_ALONE: Final = re.compile(rf"[{UNSPACED}]")
_WORD_CHARS_MAX: Final = 64
"""Longer words are no part of a repetition."""


class EchoGuard:
    """Releases an answer without the parts that repeat the system message.

    Attributes:
        stopped: the rule that ended the answer, when the action is to block.
        action: what is done.
        runs: those of the system message.
        matches: runs of words found.
        hidden: omitted spans, by offset in the input text; the last one has no end after a stop.
    """

    def __init__(self, system: str, words: int, matches: int, action: Action) -> None:
        """From the run number ``matches`` on, each of ``words`` words, ``action`` is done."""
        own = [_plain(match[0]) for match in _WORDS.finditer(system)]
        runs = (tuple(own[i : i + words]) for i in range(len(own) - words + 1))
        self.runs = frozenset(filter(all, runs))
        self._beginnings = frozenset(run[:-1] for run in self.runs)
        self._words = words
        self._needed = matches
        self.action = action
        self._last: tuple[str, ...] = ()
        self._word = ""
        """The part of an incomplete word that is already shown."""
        self._held = ""
        self._near = False
        self._inside = False
        self._gone = 0
        """The offset of what is neither shown as a beginning nor held."""
        self.stopped: tuple[str, ...] = ()
        self.matches = 0
        self.hidden: list[tuple[int, int]] = []

    @property
    def holds(self) -> bool:
        """Whether text waits."""
        return bool(self._held)

    @property
    def taken(self) -> int:
        """Characters that are dealt with."""
        return self._gone + len(self._word)

    def push(self, text: str) -> str:
        """What may be shown after ``text`` came."""
        return self._take(text, final=False)

    def finish(self) -> str:
        """The rest, when no more text comes."""
        return self._take("", final=True)

    def _take(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        text, at = self._word + self._held + new, len(self._word)
        shown: list[str] = []
        growing = len(text)
        for match in _WORDS.finditer(text):
            start, end = match.span()
            if end == len(text) and not final and not _ONE_ALONE.match(match[0]):
                growing = start
                break
            if self._completes(match[0]):
                shown.append(self._instead(text, at, start, end))
                at = end
                if self.stopped:
                    return "".join(shown)
            else:
                self._inside = False
        shown.append(self._rest(text, at, growing, final))
        self._gone += len(text) - len(self._held) - len(self._word)
        return "".join(shown)

    def _completes(self, word: str) -> bool:
        """Whether ``word`` ends a run about which something is done."""
        last = (*self._last, _plain(word))
        hit = last in self.runs
        self._last = last[1 - self._words :] if len(last) >= self._words else last
        self._near = self._last in self._beginnings
        self.matches += hit
        return hit and self.matches >= self._needed

    def _instead(self, text: str, at: int, start: int, end: int) -> str:
        """What shows from ``at`` to ``end``, where a word that is repeated begins at ``start``."""
        gap = text[at:start]
        if self.action is Action.BLOCK:
            self.stopped = (RULE,)
            self.hidden.append((self._gone + start, UNBOUNDED))
            self._gone += len(text)
            return gap
        self.hidden.append((self._gone + (at if self._inside else start), self._gone + end))
        if self._inside:
            return ""
        self._inside = True
        return gap + (PLACEHOLDER if self.action is Action.REDACT else "")

    def _rest(self, text: str, at: int, growing: int, final: bool) -> str:
        """What follows the last complete word, as far as it may be shown."""
        too_long = len(text) - growing > _WORD_CHARS_MAX
        if final or not self._near or too_long:
            self._word = text[growing:][: _WORD_CHARS_MAX + 1]
            self._held = ""
            return text[at:]
        hold_from = at if self._inside else growing
        self._word, self._held = "", text[hold_from:]
        return text[at:hold_from]


def _plain(word: str) -> str:
    return word.casefold() if len(word) <= _WORD_CHARS_MAX else ""


def echo_guard(settings: EchoSettings | None, system: str) -> EchoGuard | None:
    """The guard of an answer; None where nothing is to be done."""
    if settings is None or settings.action == "allow":
        return None
    action = Action[settings.action.upper()]
    guard = EchoGuard(system, settings.words, settings.matches, action)
    return guard if guard.runs else None
