"""The automaton of a streamed answer: follows all patterns at once and tells what may still become a match.

Patterns are matched on a view of the text (`gateway.safety.output.view`). After a control character
or a backslash the other readings are followed too, each until it has come as far as the view again.

`gateway.safety.patterns` parses a pattern into positions. RE2 tells which of them may hold a
character, for all at once. Word lists of tens of thousands of entries are sorted, and searched for
the characters read so far.

The state holds, from the oldest start to the youngest, how far the patterns that began there have
come (a bit for each position, and beginnings of words). Where two starts have come equally far,
only the older one is kept: the text that it holds back includes the younger one's. A required
prefix that is not part of a finding (a head, such as `password=`) is followed without a start and
holds nothing back. States and edges are made when they are first needed and cached, so a character
that was seen before in a state costs one look-up.

`Automaton` is shared by all answers of a policy; `StreamWatch` follows one answer.
"""

import string
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from typing_extensions import override

from gateway.safety.output.view import APART_CHARS, Place, ReadingsWatch, seen_as
from gateway.safety.patterns import (
    NOWHERE,
    Links,
    bits_of,
    positions_of,
    set_of,
    shifted,
    union,
)
from gateway.safety.rules.lexicon import fold_case
from gateway.safety.rules.spec import UNBOUNDED, Form, RuleSpec


class WordList:
    """Words in any case; one that is part of a longer word does not count.

    Attributes:
        longest: length of the longest word, in characters.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = sorted({_plain(word) for word in words} - {""})
        self.longest = max(map(len, self._words), default=0)

    def __bool__(self) -> bool:
        return bool(self._words)

    def grown(self, read: str, char: str) -> str | None:
        """Append `char` to the beginning of a word that was read; return None if no word continues so."""
        read += fold_case(char)
        at = bisect_left(self._words, read)
        return read if at < len(self._words) and self._words[at].startswith(read) else None

    def holds(self, read: str) -> bool:
        """Return whether `read` is a whole word."""
        at = bisect_left(self._words, read)
        return self._words[at] == read


def _plain(word: str) -> str:
    return "".join(fold_case(plain) for char in word if (plain := seen_as(char)))


STATES_MAX: Final = 20_000
"""States that are cached; when there are more, all are dropped and made again as needed."""

WORD_CHARS: Final = frozenset(string.ascii_letters + string.digits + "_")
"""Characters that RE2 counts as part of a word."""
_PLACES: Final = ((1,), (0,))
"""Links that may be taken inside a word, and at a boundary; see `gateway.safety.patterns.Links`."""
NO_MATCH: Final = -1
HIDDEN: Final = -2

Threads = tuple[int, tuple[str, ...]]
"""Partial matches that began at one place: bits of positions, and beginnings of words."""


@dataclass(slots=True, eq=False)
class AutomatonState:
    """The partial matches at one offset of a text.

    Attributes:
        groups: partial matches, the oldest start first.
        heads: positions of partially matched heads.
        in_word: whether the last character was part of a word.
        reach: longest possible length of a partial match, with the characters after it that decide;
            or UNBOUNDED.
        edges: transitions by character; see `Edge`.
    """

    groups: tuple[Threads, ...]
    heads: int
    in_word: bool
    reach: int
    edges: "dict[str, Edge]" = field(default_factory=dict)


Edge = tuple[AutomatonState, tuple[int, ...] | None, int, int]
"""A transition, as four values:

1. the next state;
2. the starts that remain, counted from the oldest, with the new character last (None: all old ones,
   and not the new one);
3. the start of the longest match that is now complete, NO_MATCH, or HIDDEN for an invisible
   character, which no rule counts;
4. characters behind the match that decide about it.
"""


class Automaton:
    """All patterns of a policy; shared by all answers.

    Making one raises `PatternError` if a pattern cannot be followed.

    Attributes:
        context_before: characters before a match that rules may look at.
        context_after: characters behind a match that rules may look at or a finding may grow by.
    """

    def __init__(
        self,
        rules: Sequence[RuleSpec],
        words: WordList | None = None,
        states_max: int = STATES_MAX,
    ) -> None:
        self._states_max = states_max
        self._words = words or WordList(())
        self._masks: dict[str, int] = {}
        """Positions of each set of characters."""
        self._follow: tuple[list[int], list[int]] = ([], [])
        self._first: Links = NOWHERE
        self._heads = 0
        self._last = 0
        self._waits = 0
        self._rules: list[tuple[int, int, RuleSpec]] = []
        """For each pattern its positions, those of them that end it, and its rule."""
        for rule in rules:
            for form in rule.forms:
                self._add(rule, form)
        self._sets = set_of(self._masks)
        self._symbols: dict[str, int] = {}
        self._states: dict[tuple[tuple[Threads, ...], int, bool], AutomatonState] = {}
        self.context_before = max(
            (rule.context_chars + rule.lookbehind for rule in rules), default=0
        )
        self.context_after = max((rule.lookahead for rule in rules), default=0)
        self.start = self._state((), 0, False)
        """State of an answer without a character."""

    def __len__(self) -> int:
        """Return the number of cached states."""
        return len(self._states)

    def edge(self, state: AutomatonState, char: str) -> Edge:
        """Make the edge of `state` for `char`."""
        plain = seen_as(char)
        edge = self._step(state, plain) if plain else (state, None, HIDDEN, 0)
        if len(state.edges) < self._states_max and char not in APART_CHARS:
            state.edges[char] = edge
        return edge

    def may_begin(self, text: str) -> bool:
        """Return whether a match could begin with all of `text`, wherever it stands.

        Invisible characters count for nothing.
        """
        # None stands for the first character, which begins every thread.
        threads: Threads | None = None
        for plain in filter(None, map(seen_as, text)):
            threads = self._advance(threads, plain, (0, 1), in_word=False)
            if not threads[0] and not threads[1]:
                return False
        return True

    def _add(self, rule: RuleSpec, form: Form) -> None:
        assert form.pattern.startswith(form.head), "a head is where its pattern begins"
        head_chars = len(positions_of(form.head).chars) if form.head else 0
        positions = positions_of(form.stream or form.pattern)
        base, size = len(self._follow[0]), len(positions.chars)
        for position, chars in enumerate(positions.chars, base):
            self._masks[chars] = self._masks.get(chars, 0) | 1 << position
        for own, links in zip(self._follow, positions.follow, strict=True):
            own += [mask << base for mask in links]
        self._first = union(self._first, shifted(positions.whole.first, base))
        self._heads |= ((1 << head_chars) - 1) << base
        at_boundary, inside, surely = shifted(positions.whole.last, base)
        last = at_boundary | inside
        self._last |= last
        # Where the end of the text would make it a match, the text may go on.
        self._waits |= last & ~surely
        for position in range(base, base + size):
            if any(links[position] for links in self._follow):
                self._waits |= 1 << position
        self._rules.append((((1 << size) - 1) << base, last, rule))

    def _symbol(self, plain: str) -> int:
        """Return the positions that may hold `plain`."""
        mask = self._symbols.get(plain)
        if mask is None:
            masks = [*self._masks.values()]
            mask = 0
            for number in self._sets.Match(plain.encode("utf-8", "replace")) or ():
                mask |= masks[number]
            if len(self._symbols) < self._states_max:
                self._symbols[plain] = mask
        return mask

    def _followers(self, alive: int, places: Sequence[int]) -> int:
        followers = 0
        for position in bits_of(alive):
            for place in places:
                followers |= self._follow[place][position]
        return followers

    def _step(self, state: AutomatonState, plain: str) -> Edge:
        in_word = plain in WORD_CHARS
        places = _PLACES[state.in_word != in_word]
        groups: list[Threads] = []
        remaining: list[int] = []
        started, words = self._advance(None, plain, places, in_word=state.in_word)
        started |= self._followers(state.heads, places) & self._symbol(plain)
        heads, started = started & self._heads, started & ~self._heads
        claim, after, covered = NO_MATCH, 0, 0
        for index, threads in enumerate((*state.groups, None)):
            mask, words_read = started, words
            if threads is not None:
                mask, words_read = self._advance(threads, plain, places, in_word=False)
            # An older start that has come equally far stands for this one too.
            mask &= ~covered
            covered |= mask
            # The first group to end is the oldest start: the longest match.
            if mask & self._last or any(map(self._words.holds, words_read)):
                claim = index if claim < 0 else claim
                beyond = (rule.lookahead for _, last, rule in self._rules if mask & last)
                after = max(after, *beyond, 0)
            # A thread at the very end of its pattern can neither grow nor wait.
            mask &= self._waits
            if mask or words_read:
                groups.append((mask, words_read))
                remaining.append(index)
        # The common edge keeps all starts: then the stream need not copy its list.
        same = remaining == list(range(len(state.groups)))
        next_state = self._state(tuple(groups), heads, in_word)
        return next_state, None if same else tuple(remaining), claim, after

    def _advance(
        self, threads: Threads | None, plain: str, places: Sequence[int], *, in_word: bool
    ) -> Threads:
        """Return how far `threads` come with `plain`; None: what begins with it, maybe inside a word."""
        if threads is not None:
            mask, reads = self._followers(threads[0], places), threads[1]
        else:
            mask = 0
            for place in places:
                mask |= self._first[place]
            inside = in_word and plain in WORD_CHARS
            reads = ("",) if self._words and not inside else ()
        if reads:
            grown = (self._words.grown(read, plain) for read in reads)
            reads = tuple(read for read in grown if read is not None)
        return mask & self._symbol(plain), reads

    def _state(self, groups: tuple[Threads, ...], heads: int, in_word: bool) -> AutomatonState:
        state = self._states.get((groups, heads, in_word))
        if state is None:
            # Drop all: old states would keep each other alive through their edges.
            if len(self._states) >= self._states_max:
                for old in self._states.values():
                    old.edges.clear()
                self._states.clear()
            state = AutomatonState(groups, heads, in_word, self._reach(groups))
            self._states[groups, heads, in_word] = state
        return state

    def _reach(self, groups: tuple[Threads, ...]) -> int:
        reaches = [self._words.longest] if any(reads for _, reads in groups) else []
        for mask, _ in groups:
            rules = [rule for positions, _, rule in self._rules if mask & positions]
            reaches += [rule.max_length + rule.lookahead for rule in rules]
        return max(reaches, default=0)


@dataclass(slots=True, eq=False)
class _Place(Place):
    """How far one reading of the answer has come.

    Attributes:
        starts: offsets in the answer where the partial matches of the state began.
    """

    state: AutomatonState
    starts: Sequence[int] = ()


class StreamWatch(ReadingsWatch[_Place]):
    """Partial and complete matches in one answer, by offset.

    Attributes:
        widest: most characters of any match that is partial or not dealt with.
    """

    def __init__(self, automaton: Automaton) -> None:
        super().__init__(_Place(None, automaton.start))
        self._automaton = automaton
        # Unions of places where findings may be, in order: start, end, the offset from which on it is decided.
        self._claims: list[tuple[int, int, int]] = []
        self.widest = 0

    def feed(self, text: str) -> None:
        """Follow `text`."""
        self._follow(text)

    @override
    def _state(self, place: _Place) -> object:
        return place.state, place.starts

    @override
    def _step(self, place: _Place, char: str, width: int) -> None:
        state, at = place.state, self.end
        place.state, remaining, claim, after = state.edges.get(char) or self._automaton.edge(
            state, char
        )
        if claim == HIDDEN:
            self._postpone(is_stretched=True)
        elif claim != NO_MATCH:
            start = place.starts[claim] if claim < len(place.starts) else at + 1 - width
            self.claim(start, at + 1, after)
        if remaining is not None:
            starts = [*place.starts, at + 1 - width]
            place.starts = [starts[index] for index in remaining]
            self.widest = 0 if self.is_idle else max(self.widest, place.state.reach)

    @property
    def is_idle(self) -> bool:
        """Whether there is no partial or complete match: all text is decided."""
        return not (self.view.starts or self._claims or self.further)

    @property
    def open_from(self) -> int:
        """Offset where the oldest partial match, or an escape of JSON, begins; the end if there is none."""
        first = self.view.starts[0] if self.view.starts else self.end
        for place in self.further:
            first = min(first, self.begun_at(place), *place.starts[:1])
        return first

    def free_to(self, limit: int = UNBOUNDED) -> int:
        """Return the offset, at most `limit`, up to which the text is decided: no match can come that crosses it."""
        free = min(self.open_from, limit)
        for start, end, decided in self._claims:
            if start < free and (free < end or self.end < decided):
                return start
        return free

    def claims_before(self, offset: int) -> bool:
        """Return whether anything has matched before `offset`."""
        return bool(self._claims) and self._claims[0][0] < offset

    def forget_before(self, offset: int) -> None:
        """Drop claims before `offset`: that text has been dealt with."""
        self._claims = [claim for claim in self._claims if claim[1] > offset]

    def claim(self, start: int, end: int, after: int = 0) -> None:
        """Note a possible finding from `start` to `end`, by a pattern or a model that has followed just now."""
        decided = end + after
        while self._claims and start < self._claims[-1][1]:
            first, last, later = self._claims.pop()
            start, end, decided = min(first, start), max(last, end), max(later, decided)
        # Decided no sooner than those before it, so that the undecided ones are the last.
        later = self._claims[-1][2] if self._claims else 0
        self._claims.append((start, end, max(later, decided)))

    @override
    def _omit(self) -> None:
        self._postpone(is_stretched=False)

    def _postpone(self, *, is_stretched: bool) -> None:
        """Decide one character later what is not decided yet; an invisible character stretches it."""
        for index in range(len(self._claims) - 1, -1, -1):
            start, end, decided = self._claims[index]
            if decided <= self.end:
                return
            stretch = is_stretched and end > self.end
            self._claims[index] = start, end + stretch, decided + 1
