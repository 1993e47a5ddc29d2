"""The automaton of a streamed answer: follows all patterns at once and tells what can still become a match.

Patterns are matched on a view of the text: no invisible characters, look-alikes of ASCII as ASCII. Full-width and
mathematical letters, digits of every script and the many dashes become ASCII. Each character is mapped by itself, so
that a stream and a whole text read alike: it is left out, becomes one ASCII character, or stays.

A pattern becomes Glushkov's automaton: one position for each of its characters, and which positions may follow each.
Every path through the positions spells a text that the pattern may match. Counted repeats are written out; where that
would take too many positions the repeat has no upper bound instead, so the automaton follows more texts than the
pattern matches, never fewer. Word lists of tens of thousands of entries are sorted; a node of the word tree is the
range of words that begin with the characters read so far, and is built on first use.

The state holds, from the oldest start to the youngest, how far the patterns that began there have come (a bit for each
position, nodes of `WordList`). Where two starts have come equally far, only the older one is kept:
the text that it holds back includes the younger one's. A required prefix that is not part of a finding (a head, such as
``password=``) is followed without a start and holds nothing back. States and edges are made when they are first
needed and kept, so a character that was seen before in a state costs one look-up.

`Automaton` is shared by all answers of a policy; `StreamWatch` follows one answer.
"""

import sys
import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Final, Literal, Protocol

from typing_extensions import override

from gateway.safety.findings import Finding
from gateway.safety.patterns import (
    PATTERNS_KEPT,
    Alternation,
    Assertion,
    Char,
    CharSet,
    Concat,
    Node,
    PatternError,
    Repeat,
    Zero,
    cases,
    is_ascii_word,
    parse,
)
from gateway.safety.rules.lexicon import fold_case
from gateway.safety.rules.spec import LOOKAHEAD, LOOKBEHIND, RuleError, RuleSpec
from gateway.safety.text import characters as c

_UNSEEN: Final = frozenset(
    map(chr, {*c.members(c.INVISIBLE + c.BLANKS)}.difference(c.members(c.CONTROLS)))
)
_DASHES: Final = frozenset(map(chr, c.members(c.DASHES)))


class Scanner(Protocol):
    """Finds matches of rules. The result at an offset depends only on the text near it."""

    def scan(self, text: str) -> Sequence[Finding]:
        """All findings in ``text``."""


@lru_cache(maxsize=65536)
def seen_as(char: str) -> str:
    """What ``char`` is in the view: one character, or nothing for an invisible one."""
    if char.isascii():
        return char
    if char in _UNSEEN:
        return ""
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    if char in _DASHES:
        return "-"
    plain = unicodedata.normalize("NFKC", char)
    return plain if len(plain) == 1 and plain.isascii() else char


def view(text: str) -> tuple[str, Sequence[int]]:
    """``text`` in the view, and for each character of the view its offset in ``text``."""
    if text.isascii():
        return text, range(len(text))
    kept = [(index, plain) for index, char in enumerate(text) if (plain := seen_as(char))]
    return "".join(plain for _, plain in kept), [index for index, _ in kept]


def after_seen(text: str, at: int, chars: int) -> int:
    """The offset ``chars`` characters of the view behind ``at``, or the end of ``text``."""
    if text[at : at + chars].isascii():
        return min(at + chars, len(text))
    while chars > 0 and at < len(text):
        chars -= bool(seen_as(text[at]))
        at += 1
    return at


def before_seen(text: str, chars: int) -> int:
    """The offset ``chars`` characters of the view before the end of ``text``, or 0."""
    at = len(text)
    if chars >= at:
        return 0
    while chars > 0 and at > 0:
        at -= 1
        chars -= bool(seen_as(text[at]))
    return at


class ViewScanner(Scanner):
    """Scanners that look at the view; their findings are spans of the text itself. ``rules``: those that count."""

    def __init__(self, *scanners: Scanner, rules: Collection[str] | None = None) -> None:
        self._scanners = scanners
        self._rules = rules

    @override
    def scan(self, text: str) -> list[Finding]:
        plain, offsets = view(text)
        found = [one for scanner in self._scanners for one in scanner.scan(plain)]
        if self._rules is not None:
            found = [one for one in found if one.rule in self._rules]
        if plain is text:
            return found
        return [
            replace(f, start=offsets[f.start], end=offsets[f.end - 1] + 1)
            for f in found
            if f.end > f.start
        ]


UNBOUNDED: Final = sys.maxsize


@dataclass(frozen=True)
class WatchedRule:
    """A rule as the filter must know it.

    Attributes:
        id: its name.
        patterns: regular expressions in RE2's syntax; together they match all that the rule can find, and more is no
            harm.
        max_match_chars: no match is longer; None where there is no bound.
        context_before: characters before a match that decide about it.
        context_after: characters behind it that decide about it.
        heads: for each pattern its beginning that no finding holds, or nothing; at most ``context_before`` characters.
    """

    id: str
    patterns: tuple[str, ...]
    max_match_chars: int | None = None
    context_before: int = 0
    context_after: int = 0
    heads: tuple[str, ...] = ()


def watched_rules(specs: Iterable[RuleSpec]) -> tuple[WatchedRule, ...]:
    """``specs`` as the stream follows them."""
    return tuple(
        WatchedRule(
            spec.id,
            tuple(form.stream or form.pattern for form in spec.forms),
            max_match_chars=spec.max_length,
            context_before=spec.context_chars + LOOKBEHIND,
            context_after=LOOKAHEAD,
            heads=tuple(form.head for form in spec.forms),
        )
        for spec in specs
    )


class WordNode:
    """The words that begin with the same characters.

    Attributes:
        complete: the characters are a word.
    """

    __slots__ = ("_children", "_depth", "_high", "_low", "_words", "complete")

    def __init__(self, words: list[str], low: int, high: int, depth: int) -> None:
        self._words, self._low, self._high, self._depth = words, low, high, depth
        self._children: dict[str, WordNode | None] = {}
        self.complete = low < high and len(words[low]) == depth

    def child(self, char: str) -> "WordNode | None":
        """The words that go on with ``char``; None when there are none."""
        char = fold_case(char)
        if char not in self._children:
            self._children[char] = self._find(char)
        return self._children[char]

    def _find(self, char: str) -> "WordNode | None":
        read = self._words[self._low][: self._depth] + char
        low = bisect_left(self._words, read, self._low, self._high)
        if low == self._high or not self._words[low].startswith(read):
            return None
        high = bisect_left(self._words, read + "\U0010ffff", low, self._high)
        return WordNode(self._words, low, high, self._depth + 1)


class WordList:
    """Words in any case; one that is part of a longer word does not count.

    Attributes:
        longest: characters of the longest word.
    """

    def __init__(self, words: Iterable[str]) -> None:
        sorted_words = sorted({_plain(word) for word in words} - {""})
        self.longest = max(map(len, sorted_words), default=0)
        self.root = WordNode(sorted_words, 0, len(sorted_words), 0) if sorted_words else None

    def begin(self, char: str, before_is_word: bool) -> WordNode | None:
        """The words that can begin with ``char``."""
        if self.root is None or (before_is_word and is_ascii_word(char)):
            return None
        return self.root.child(char)


def _plain(word: str) -> str:
    return "".join(fold_case(plain) for char in word if (plain := seen_as(char)))


When = Assertion | None
"""The assertion that must hold between two positions; None: no assertion."""
Empty = When | Literal[False]
"""Where a part can match nothing; False: nowhere."""

REPEAT_POSITIONS_MAX: Final = 600
"""Positions that one counted repeat may take."""
PATTERN_POSITIONS_MAX: Final = 6000
_SAMPLE: Final = (*map(chr, range(128)), "é", "中", "١", "\u2028", "😀")


@dataclass
class Part:
    """What the automaton must know of a part of a pattern.

    Attributes:
        empty: where it can match nothing.
        first: positions that can begin it.
        last: positions that can end it.
    """

    empty: Empty
    first: dict[int, When] = field(default_factory=dict)
    last: dict[int, When] = field(default_factory=dict)


@dataclass
class Positions:
    """All positions of one pattern.

    Attributes:
        chars: the set of each position.
        follow: what may come behind each position.
        whole: the pattern as one part.
        finished_by_end: positions of the lazy repeat that is over once the pattern has matched.
    """

    chars: list[CharSet] = field(default_factory=list)
    follow: list[dict[int, When]] = field(default_factory=list)
    whole: Part = field(default_factory=lambda: Part(None))
    finished_by_end: frozenset[int] = frozenset()


@lru_cache(PATTERNS_KEPT)
def positions_of(pattern: str) -> Positions:
    """The automaton of ``pattern``, shared by all who ask.

    Raises:
        PatternError: it cannot be followed, is too large, or matches nothing at all.
    """
    built = _Builder()
    built.positions.whole = built.top(parse(pattern))
    if built.positions.whole.empty is not False:
        raise PatternError("the pattern matches the empty text")
    return built.positions


class _Builder:
    def __init__(self) -> None:
        self.positions = Positions()

    def top(self, node: Node) -> Part:
        """The part of the whole pattern; notes the lazy repeats on the way."""
        if isinstance(node, Alternation):
            return self._either([self.top(option) for option in node.options])
        parts = node.parts if isinstance(node, Concat) else (node,)
        lazy = _ends_lazily(parts)
        if lazy is None:
            return self.part(node)
        head = self._joined([self.part(part) for part in parts[:lazy]])
        start = len(self.positions.chars)
        unique = self._ends_once(head)
        loop = self.part(parts[lazy])
        if unique:
            self.positions.finished_by_end |= set(range(start, len(self.positions.chars)))
        tail = [self.part(part) for part in parts[lazy + 1 :]]
        return self._joined([head, loop, *tail])

    def part(self, node: Node) -> Part:
        if isinstance(node, Char):
            return self._char(node.chars)
        if isinstance(node, Zero):
            return Part(node.assertion)
        if isinstance(node, Concat):
            return self._joined([self.part(part) for part in node.parts])
        if isinstance(node, Alternation):
            return self._either([self.part(option) for option in node.options])
        return self._repeated(node)

    def _char(self, chars: CharSet) -> Part:
        position = len(self.positions.chars)
        if position >= PATTERN_POSITIONS_MAX:
            raise PatternError(f"more than {PATTERN_POSITIONS_MAX} characters when written out")
        self.positions.chars.append(chars)
        self.positions.follow.append({})
        return Part(False, {position: None}, {position: None})

    def _joined(self, parts: Sequence[Part]) -> Part:
        whole = Part(None)
        for part in parts:
            whole = self._pair(whole, part)
        return whole

    def _pair(self, left: Part, right: Part) -> Part:
        self._connect(left.last, right.first)
        first, last = dict(left.first), dict(right.last)
        if left.empty is not False:
            _merge_links(first, _under(right.first, left.empty))
        if right.empty is not False:
            _merge_links(last, _under(left.last, right.empty))
        return Part(_both_empty(left.empty, right.empty), first, last)

    def _either(self, options: Sequence[Part]) -> Part:
        whole = Part(False)
        for option in options:
            _merge_links(whole.first, option.first)
            _merge_links(whole.last, option.last)
            whole.empty = _any_empty(whole.empty, option.empty)
        return whole

    def _repeated(self, node: Repeat) -> Part:
        low, high = node.low, node.high
        size = max(1, _size(node.part))
        most = max(1, REPEAT_POSITIONS_MAX // size)
        if low > most or (high is not None and high > most):
            low, high = min(low, most), None
        if high is None:
            return self._at_least(node.part, low)
        return self._joined(
            [*(self.part(node.part) for _ in range(low)), self._up_to(node.part, high - low)]
        )

    def _at_least(self, node: Node, low: int) -> Part:
        parts = [self.part(node) for _ in range(max(low, 1))]
        loop = parts[-1]
        self._connect(loop.last, loop.first)
        if low == 0:
            loop.empty = None
        return self._joined(parts)

    def _up_to(self, node: Node, times: int) -> Part:
        """``(x(x(x)?)?)?``, which needs fewer links than ``x?x?x?``."""
        whole = Part(None)
        for _ in range(times):
            whole = self._pair(self.part(node), whole)
            whole.empty = None
        return whole

    def _connect(self, last: dict[int, When], first: dict[int, When]) -> None:
        for position, after in last.items():
            _merge_links(self.positions.follow[position], _under(first, after))

    def _ends_once(self, head: Part) -> bool:
        """Whether from one start ``head`` can end at one place alone: no match of it begins a longer one."""
        if head.empty is not False:
            return not head.first
        follow, chars = self.positions.follow, self.positions.chars
        waiting = [(p, q) for p in head.first for q in head.first]
        seen: set[tuple[int, int]] = set()
        while waiting:
            p, q = waiting.pop()
            if (p, q) in seen or not _overlap(chars[p], chars[q]):
                continue
            seen.add((p, q))
            if p in head.last and follow[q]:
                return False
            waiting += [(a, b) for a in follow[p] for b in follow[q]]
        return True


def _size(node: Node) -> int:
    if isinstance(node, Char):
        return 1
    if isinstance(node, Concat):
        return sum(map(_size, node.parts))
    if isinstance(node, Alternation):
        return sum(map(_size, node.options))
    if isinstance(node, Repeat):
        times = node.high if node.high is not None else max(node.low, 1)
        return min(times * _size(node.part), REPEAT_POSITIONS_MAX)
    return 0


def _overlap(left: CharSet, right: CharSet) -> bool:
    """Whether both may hold the same character. Sets of few characters outside the sample are compared by range."""
    if any(left.may_hold(char) and right.may_hold(char) for char in _SAMPLE):
        return True
    ends = [char for pair in (*left.ranges, *right.ranges) for char in pair]
    return any(left.may_hold(char) and right.may_hold(char) for char in ends)


def _under(parts: dict[int, When], when: When) -> dict[int, When]:
    """``parts`` with one place more on the way; what cannot be is left out."""
    joined = {position: _both(own, when) for position, own in parts.items()}
    return {position: own for position, own in joined.items() if own is not False}


def _merge_links(into: dict[int, When], more: dict[int, When]) -> None:
    for position, when in more.items():
        into[position] = when if into.get(position, when) == when else None


def _both(left: When, right: When) -> Empty:
    """Both places at once; False for a boundary where there must be none."""
    if left == right or right is None:
        return left
    if left is None or left is Assertion.EDGE:
        return right
    return left if right is Assertion.EDGE else False


def _both_empty(left: Empty, right: Empty) -> Empty:
    if left is False or right is False:
        return False
    return _both(left, right)


def _any_empty(left: Empty, right: Empty) -> Empty:
    if left is False:
        return right
    if right is False:
        return left
    return left if left == right else None


def _ends_lazily(parts: Sequence[Node]) -> int | None:
    """Index of the lazy repeat after which a sequence ends as soon as it can, or None."""
    lazy = [
        at
        for at, part in enumerate(parts)
        if isinstance(part, Repeat) and part.lazy and part.high != 1
    ]
    return lazy[-1] if lazy else None


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
        self.start = self._state((), 0, NO_WORD)
        """The state of an answer without a character."""

    def __len__(self) -> int:
        """States in use."""
        return len(self._states)

    def begin(self, before: str) -> AutomatonState:
        """The state behind ``before`` when no finding that began in it is under way; it may hold heads."""
        state = self._state((), 0, ANY_WORD)
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
        self._state = automaton.begin(before) if before else automaton.start
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
