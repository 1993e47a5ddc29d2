"""The one pass over the text that says which patterns occur in it at all (Vectorscan, block mode).

Every pattern reports once at most, so the pass costs the same for hostile text: it is linear and calls back no more
often than there are patterns. Where the matches are, RE2 says, and only for patterns that occur. A pass may report
a pattern that does not occur (large repeats are approximated), never the other way round.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Final

import hyperscan

from gateway.safety.rules.spec import RuleError
from gateway.safety.rules.work import Work

_FLAGS: Final = hyperscan.HS_FLAG_UTF8 | hyperscan.HS_FLAG_SINGLEMATCH | hyperscan.HS_FLAG_PREFILTER


class Prefilter:
    """Patterns compiled together. One scan at a time: the scratch space is not shared between threads."""

    def __init__(self, named: Sequence[tuple[str, str]]) -> None:
        """``named``: rule id and pattern; a pattern is known by its place in the sequence."""
        self._database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        if not named:
            named = [("", r"\x00never\x00")]
        try:
            _compile(self._database, [pattern for _, pattern in named])
        except hyperscan.error as error:
            raise _culprit(named) or RuleError(named[0][0], str(error)) from None

    def present(self, data: bytes, work: Work) -> Mapping[int, int]:
        """The patterns that occur, each with the byte offset where its first match may end."""
        found: dict[int, int] = {}
        work.bytes_scanned += len(data)
        if data:
            self._database.scan(data, match_event_handler=_note, context=found)
        return found


@functools.lru_cache(maxsize=8)
def prefilter(named: tuple[tuple[str, str], ...]) -> Prefilter:
    """A `Prefilter`, compiled once per set of patterns: a new policy mostly keeps the patterns of the old one."""
    return Prefilter(named)


def _note(pattern: int, start: int, end: int, flags: int, found: object) -> None:
    assert isinstance(found, dict)
    found[pattern] = end


def _compile(database: hyperscan.Database, patterns: Sequence[str]) -> None:
    database.compile(
        expressions=[pattern.encode() for pattern in patterns],
        ids=list(range(len(patterns))),
        flags=[_FLAGS] * len(patterns),
    )


def _culprit(named: Sequence[tuple[str, str]]) -> RuleError | None:
    """The engine does not say which pattern it refused, so they are tried one by one."""
    for rule, pattern in named:
        try:
            _compile(hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK), [pattern])
        except hyperscan.error as error:
            return RuleError(rule, f"the engine refuses the pattern: {error}", 0)
    return None
