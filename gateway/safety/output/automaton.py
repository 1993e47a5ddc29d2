"""Streaming automaton: follows all patterns through a text at once and tells what can still become a match.

The state holds, from the oldest start to the youngest, how far the patterns that began there have come (a bit for each
position of `positions`, nodes of `WordList`). Where two starts have come equally far, only the older one is kept:
the text that it holds back includes the younger one's. A required prefix that is not part of a finding (a head, such as
``password=``) is followed without a start and holds nothing back. States and edges are made when they are first
needed and kept, so a character that was seen before in a state costs one look-up.

`Automaton` is shared by all answers of a policy; `StreamWatch` follows one answer.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Final

from gateway.safety.output.positions import Positions, When, positions_of
from gateway.safety.output.view import seen_as
from gateway.safety.output.watched import UNBOUNDED, WatchedRule, WordList, WordNode
from gateway.safety.patterns import Assertion, CharSet, PatternError, cases, is_ascii_word
from gateway.safety.rules.spec import RuleError

STATES_MAX: Final = 20_000
"""States kept; when there are more, all are forgotten and made again as needed."""

WORD: Final = 1
NO_WORD: Final = 0
ANY_WORD: Final = 2
"""Whether a character is part of a word; outside ASCII engines disagree."""

_ALL_PLACES: Final = (0, 1, 2)
NO_MATCH: Final = -1
HIDDEN: Final = -2

Threads = tuple[int, tuple[WordNode, ...]]
"""What began at one place: bits of positions, and nodes of word lists."""


class AutomatonState:
    """The partial matches at one offset of a text.

    Attributes:
        edges: by character; see `Edge`.
        alike: by what the automaton knows of a character.
        groups: partial matches, the oldest start first.
        heads: positions of partially matched heads.
        kind: whether the last character was part of a word.
        reach: longest possible length of a partial match, with the characters after it that decide; or UNBOUNDED.
    """

    __slots__ = ("alike", "edges", "groups", "heads", "kind", "reach")

    def __init__(self, groups: tuple[Threads, ...], heads: int, kind: int, reach: int) -> None:
        self.edges: dict[str, Edge] = {}
        self.alike: dict[tuple[int, int, str], Edge] = {}
        self.groups = groups
        self.heads = heads
        self.kind = kind
        self.reach = reach


Edge = tuple[AutomatonState, tuple[int, ...] | None, int, int]
"""The next state; which starts are left, counted from the oldest, the new character last (None: all old ones, and not
the new one); the start of the longest match that is now complete, NO_MATCH, or HIDDEN behind an invisible character,
which no rule counts; characters behind it that decide about it."""


class Automaton:
    """All patterns of a policy; shared by all answers.

    Attributes:
        context_before: characters before a match that rules may look at.
        context_after: characters behind it, those that a finding may grow by among them.
    """

    def __init__(self, rules: Sequence[WatchedRule], words: WordList | None = None) -> None:
        self._words = words or WordList(())
        self._chars: list[CharSet] = []
        self._follow: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._first = [0, 0, 0]
        self._heads = 0
        self._last = 0
        self._waits = 0
        self._finished: list[tuple[int, int]] = []
        self._reaches: list[tuple[int, int]] = []
        self._beyond: list[tuple[int, int]] = []
        for rule in rules:
            self._add(rule)
        masks: dict[CharSet, int] = {}
        for position, chars in enumerate(self._chars):
            masks[chars] = masks.get(chars, 0) | 1 << position
        self._sets, self._masks = list(masks), list(masks.values())
        self._foreign_ranges = {
            pair for chars in self._sets for pair in chars.ranges if not pair[1].isascii()
        }
        self._foreign_ends = {
            form for pair in self._foreign_ranges for char in pair for form in cases(char)
        }
        self._symbols: dict[str, int] = {}
        self._states: dict[tuple[tuple[Threads, ...], int, int], AutomatonState] = {}
        self.context_before = max((rule.context_before for rule in rules), default=0)
        self.context_after = max((rule.context_after for rule in rules), default=0)

    def __len__(self) -> int:
        """States in use."""
        return len(self._states)

    def begin(self, before: str = "") -> AutomatonState:
        """The state behind ``before`` when no finding that began in it is under way; it may hold heads."""
        state = self._state((), 0, ANY_WORD if before else NO_WORD)
        for char in before:
            if plain := seen_as(char):
                after = self._alike(state, plain)[0]
                state = self._state((), after.heads, after.kind)
        return state

    def edge(self, state: AutomatonState, char: str) -> Edge:
        """The edge of ``state`` for ``char``, made now."""
        plain = seen_as(char)
        edge = self._alike(state, plain) if plain else (state, None, HIDDEN, 0)
        if len(state.edges) < STATES_MAX:
            state.edges[char] = edge
        return edge

    def may_begin(self, char: str) -> bool:
        """Whether any match can begin with ``char``; an invisible one says nothing and counts as one that can."""
        plain = seen_as(char)
        if not plain:
            return True
        mask, nodes = self._advance(None, plain, _ALL_PLACES, NO_WORD)
        return bool(mask & self._symbol(plain)) or bool(nodes)

    def crosses(self, text: str, at: int) -> bool:
        """Whether a match could begin with ``text``, were that any kind of place, and hold character ``at``."""
        alive, begun = 0, False
        nodes: tuple[WordNode, ...] = ()
        for char in text[: at + 1]:
            plain = seen_as(char)
            if not plain:
                continue
            if begun:
                alive, nodes = self._advance((alive, nodes), plain, _ALL_PLACES, NO_WORD)
            else:
                alive, nodes = self._advance(None, plain, _ALL_PLACES, NO_WORD)
            begun = True
            alive &= self._symbol(plain)
            if not alive and not nodes:
                return False
        return begun

    def _add(self, rule: WatchedRule) -> None:
        for pattern, head in zip_longest(rule.patterns, rule.heads, fillvalue=""):
            assert pattern.startswith(head), "a head is where its pattern begins"
            try:
                positions = positions_of(pattern)
                head_chars = len(positions_of(head).chars) if head else 0
            except PatternError as error:
                raise RuleError(rule.id, error.reason, error.position) from None
            self._place(rule, positions, head_chars)

    def _place(self, rule: WatchedRule, positions: Positions, head_chars: int) -> None:
        base = len(self._chars)
        self._heads |= _bits(range(head_chars), base)
        self._chars += positions.chars
        for links in positions.follow:
            for kind, mask in enumerate(_by_place(links, base)):
                self._follow[kind].append(mask)
        for kind, mask in enumerate(_by_place(positions.whole.first, base)):
            self._first[kind] |= mask
        last = _bits(positions.whole.last, base)
        own = _bits(range(len(positions.chars)), base)
        self._last |= last
        waits = {
            p
            for p in range(len(positions.chars))
            if positions.follow[p] or positions.whole.last.get(p) is not None
        }
        self._waits |= _bits(waits, base)
        if positions.finished_by_end:
            # Where the end of the text would make it a match, the text may go on.
            sure = _bits((p for p, when in positions.whole.last.items() if when is None), base)
            self._finished.append((sure, ~_bits(positions.finished_by_end, base)))
        most = rule.max_match_chars
        reach = UNBOUNDED if most is None else most + rule.context_after
        self._reaches.append((reach, own))
        if rule.context_after:
            self._beyond.append((last, rule.context_after))

    def _alike(self, state: AutomatonState, plain: str) -> Edge:
        """The edge that all characters share of which the patterns know the same."""
        key = self._symbol(plain), _kind(plain), plain if self._words.root is not None else ""
        edge = state.alike.get(key)
        if edge is None:
            edge = state.alike[key] = self._step(state, plain)
        return edge

    def _symbol(self, plain: str) -> int:
        """The positions that may hold ``plain``."""
        key = plain if plain.isascii() or self._is_named(plain) else _foreign(plain)
        mask = self._symbols.get(key)
        if mask is None:
            mask = 0
            for chars, positions in zip(self._sets, self._masks, strict=True):
                if chars.may_hold(plain):
                    mask |= positions
            if len(self._symbols) < STATES_MAX:
                self._symbols[key] = mask
        return mask

    def _is_named(self, plain: str) -> bool:
        """Whether a set may tell this character outside ASCII from others of its kind."""
        forms = cases(plain)
        if any(form.isascii() for form in forms) or not forms.isdisjoint(self._foreign_ends):
            return True
        return any(first <= form <= last for form in forms for first, last in self._foreign_ranges)

    def _followers(self, alive: int, kinds: Sequence[int]) -> int:
        found = 0
        for kind in kinds:
            follow = self._follow[kind]
            rest = alive
            while rest:
                lowest = rest & -rest
                found |= follow[lowest.bit_length() - 1]
                rest ^= lowest
        return found

    def _step(self, state: AutomatonState, plain: str) -> Edge:
        kind = _kind(plain)
        places = _places(state.kind, kind)
        allowed = self._symbol(plain)
        groups: list[Threads] = []
        kept: list[int] = []
        begun, words = self._advance(None, plain, places, state.kind)
        begun = (begun | self._followers(state.heads, places)) & allowed
        heads, begun = begun & self._heads, begun & ~self._heads
        claim, after, seen = NO_MATCH, 0, 0
        for index, threads in enumerate((*state.groups, None)):
            mask, nodes = begun, words
            if threads is not None:
                mask, nodes = self._advance(threads, plain, places, state.kind)
            mask &= allowed & ~seen
            seen |= mask
            if mask & self._last or any(node.complete for node in nodes):
                claim = index if claim < 0 else claim
                after = max(after, self._look_beyond(mask))
                mask = self._unfinished(mask)
            mask &= self._waits
            if mask or nodes:
                groups.append((mask, nodes))
                kept.append(index)
        old = len(state.groups)
        same = kept == list(range(old))
        next_state = self._state(tuple(groups), heads, kind)
        return next_state, None if same else tuple(kept), claim, after

    def _advance(
        self, threads: Threads | None, plain: str, places: Sequence[int], before: int
    ) -> Threads:
        if threads is None:
            mask = 0
            for place in places:
                mask |= self._first[place]
            node = self._words.begin(plain, before == WORD)
            return mask, () if node is None else (node,)
        grown = [child for node in threads[1] if (child := node.child(plain)) is not None]
        return self._followers(threads[0], places), tuple(grown)

    def _look_beyond(self, mask: int) -> int:
        """Characters behind a match that ends at a position of ``mask`` that decide about it."""
        return max((context for last, context in self._beyond if mask & last), default=0)

    def _unfinished(self, mask: int) -> int:
        for last, others in self._finished:
            if mask & last:
                mask &= others
        return mask

    def _state(self, groups: tuple[Threads, ...], heads: int, kind: int) -> AutomatonState:
        state = self._states.get((groups, heads, kind))
        if state is None:
            if len(self._states) >= STATES_MAX:
                for old in self._states.values():
                    old.edges.clear()
                    old.alike.clear()
                self._states.clear()
            state = AutomatonState(groups, heads, kind, self._reach(groups))
            self._states[groups, heads, kind] = state
        return state

    def _reach(self, groups: tuple[Threads, ...]) -> int:
        mask, reach = 0, 0
        for own, nodes in groups:
            mask |= own
            reach = max(reach, self._words.longest if nodes else 0)
        for chars, positions in self._reaches:
            if mask & positions and chars > reach:
                reach = chars
        return reach


def _foreign(char: str) -> str:
    """A key for all characters outside ASCII that classes such as ``\\w`` treat alike."""
    return f"foreign {char.isalnum():d}{char.isspace():d}{char.isdecimal():d}"


def _kind(char: str) -> int:
    if not char:
        return NO_WORD
    if char.isascii():
        return WORD if is_ascii_word(char) else NO_WORD
    return ANY_WORD if char.isalnum() else NO_WORD


def _places(before: int, now: int) -> tuple[int, ...]:
    """Which links may be taken between two characters: 0 any, 1 over a boundary, 2 where there is none."""
    if ANY_WORD in (before, now):
        return _ALL_PLACES
    return (0, 1) if before != now else (0, 2)


def _by_place(links: dict[int, When], base: int) -> tuple[int, int, int]:
    plain = _bits((p for p, when in links.items() if when in (None, Assertion.EDGE)), base)
    over = _bits((p for p, when in links.items() if when is Assertion.BOUNDARY), base)
    inside = _bits((p for p, when in links.items() if when is Assertion.NO_BOUNDARY), base)
    return plain, over, inside


def _bits(positions: Iterable[int], base: int) -> int:
    mask = 0
    for position in positions:
        mask |= 1 << (base + position)
    return mask


class StreamWatch:
    """What is under way and what has matched, by offset in the answer.

    Attributes:
        end: characters followed so far.
        widest: the most characters that any match may have that is under way, or not dealt with.
    """

    def __init__(self, automaton: Automaton, at: int = 0, before: str = "") -> None:
        """Begins at offset ``at``, behind ``before``."""
        self._automaton = automaton
        self._state: AutomatonState = automaton.begin(before)
        self._starts: list[int] = []
        # Unions of places where findings may be, in order: start, end, the offset from which on it is decided.
        self._claims: list[tuple[int, int, int]] = []
        self.end = at
        self.widest = 0

    def feed(self, text: str) -> None:
        """Follows ``text``."""
        state, starts, at = self._state, self._starts, self.end
        edges = state.edges
        for char in text:
            edge = edges.get(char)
            if edge is None:
                edge = self._automaton.edge(state, char)
            state, kept, claim, after = edge
            edges = state.edges
            if claim != NO_MATCH:
                if claim == HIDDEN:
                    self._stretch(at)
                else:
                    start = starts[claim] if claim < len(starts) else at
                    self._claim(start, at + 1, after)
            if kept is not None:
                starts.append(at)
                starts = [starts[index] for index in kept]
                busy = starts or self._claims
                self.widest = max(self.widest, state.reach) if busy else 0
            at += 1
        self._state, self._starts, self.end = state, starts, at

    @property
    def open_from(self) -> int:
        """Where the oldest match under way begins; the end when there is none."""
        return self._starts[0] if self._starts else self.end

    @property
    def free_to(self) -> int:
        """Up to here the text is decided: no match can come that holds a character before it and one behind it."""
        free = self.open_from
        for start, end, decided in self._claims:
            if start < free and (free < end or self.end < decided):
                return start
        return free

    def claim(self, start: int, end: int) -> None:
        """Something else than a pattern has found what is at ``start`` to ``end``, where it has followed just now."""
        self._claim(start, end, 0)

    def claims_before(self, offset: int) -> bool:
        """Whether anything has matched before ``offset``."""
        return bool(self._claims) and self._claims[0][0] < offset

    def forget_before(self, offset: int) -> None:
        """The text before ``offset`` has been dealt with."""
        if self._claims:
            self._claims = [claim for claim in self._claims if claim[1] > offset]

    def _claim(self, start: int, end: int, after: int) -> None:
        decided = end + after
        while self._claims and start < self._claims[-1][1]:
            first, last, later = self._claims.pop()
            start, end, decided = min(first, start), max(last, end), max(later, decided)
        # Decided no sooner than those before it, so that the undecided ones are the last.
        later = self._claims[-1][2] if self._claims else 0
        self._claims.append((start, end, max(later, decided)))

    def _stretch(self, at: int) -> None:
        """Lengthens what is still to come by an invisible character at offset ``at``."""
        for index in range(len(self._claims) - 1, -1, -1):
            start, end, decided = self._claims[index]
            if decided <= at:
                return
            self._claims[index] = start, end + (end > at), decided + 1
