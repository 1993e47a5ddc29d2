"""Glushkov's automaton: one position for each character of a pattern, and which positions may follow each.

Every path through the positions spells a text that the pattern may match. Counted repeats are written out; where that
would take too many positions the repeat has no upper bound instead, so the automaton follows more texts than the
pattern matches, never fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

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
    parse,
)

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
            _merge(first, _under(right.first, left.empty))
        if right.empty is not False:
            _merge(last, _under(left.last, right.empty))
        return Part(_both_empty(left.empty, right.empty), first, last)

    def _either(self, options: Sequence[Part]) -> Part:
        whole = Part(False)
        for option in options:
            _merge(whole.first, option.first)
            _merge(whole.last, option.last)
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
            _merge(self.positions.follow[position], _under(first, after))

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


def _merge(into: dict[int, When], more: dict[int, When]) -> None:
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
