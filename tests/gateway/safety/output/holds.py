"""How much of a streamed answer waits: the automaton of answers beside a bounded hold-back without it.

    python -m tests.gateway.safety.output.holds [FILE ...]

Each text (a file; without files, ordinary texts of the tests) is an answer, cut into pieces of a word or a sign. After
each piece, the hold is the number of characters that came and may not be shown yet. Watched are the default rules that
the shipped policy changes in answers, redacted from severity critical on. Compared are:

- automaton: `StreamWatch`, which knows whether a match is still possible.
- last start: everything from the last character on at which a pattern can begin. It is no filter: a secret that has
  another possible start inside leaves in part (`leaks`: samples of the rules of which a character shows that the
  automaton holds). It bounds from below what any
  rule of first characters holds.
- first start: everything from the first character on at which a pattern can begin, and from which no longest match
  has passed. It leaks nothing.
- partial: from the first start at which the library `regex` says that a match may still come; it backtracks.

Printed as JSON by way: hold at the median and at p99 in characters, pieces that came until the first text shows (the
most of any answer), and microseconds of processor time a piece.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path

import regex  # type: ignore[import-untyped]  # has no stubs

from gateway.safety.findings import Severity
from gateway.safety.output.automaton import Automaton, StreamWatch, WatchedRule, watched_rules
from gateway.safety.rules.spec import default_rules
from tests.gateway.safety.rules.benign import texts
from tests.gateway.safety.rules.samples import FOUND

_PIECE = re.compile(r" ?\w{1,8}|\s+|.", re.DOTALL)
_HEAD_ENDS = re.compile(r"[\w~.:/=>`'\"\s-]")
"""The characters that end a required prefix which is no part of a finding."""
_LONGEST = 400
"""Characters after which a start is given up; private keys and JWT are left out of both sides."""

Way = Callable[[Sequence[str]], Iterator[int]]
"""The hold after each piece of one answer."""


def watched() -> tuple[WatchedRule, ...]:
    """What the shipped policy changes in answers, without the two rules of thousands of characters."""
    specs = [
        spec
        for spec in default_rules()
        if spec.severity >= Severity.CRITICAL and spec.max_length <= _LONGEST
    ]
    return watched_rules(specs)


def by_automaton(automaton: Automaton) -> Way:
    """The holds of the filter as it is."""

    def holds(pieces: Sequence[str]) -> Iterator[int]:
        watch = StreamWatch(automaton)
        for piece in pieces:
            watch.feed(piece)
            yield watch.end - watch.free_to

    return holds


def by_start(automaton: Automaton, last: bool) -> Way:
    """The holds of a rule that knows first characters and ends of words alone."""

    def holds(pieces: Sequence[str]) -> Iterator[int]:
        starts: list[int] = []
        end, before = 0, " "
        for piece in pieces:
            for char in piece:
                if _begins(automaton, before, char):
                    starts.append(end)
                before = char
                end += 1
            starts = [at for at in starts if end - at < _LONGEST]
            yield end - starts[-1 if last else 0] if starts else 0

    return holds


def _begins(automaton: Automaton, before: str, char: str) -> bool:
    inside = before.isalnum() and char.isalnum()
    return not inside and automaton.may_begin(char)


def by_partial(rules: Sequence[WatchedRule], automaton: Automaton) -> Way:
    """The holds of partial matches, asked at the possible starts of the tail alone."""
    patterns = [
        regex.compile(_behind(pattern, head))
        for rule in rules
        for pattern, head in zip_longest(rule.patterns, rule.heads, fillvalue="")
    ]

    def holds(pieces: Sequence[str]) -> Iterator[int]:
        text, starts = "", list[int]()
        for piece in pieces:
            for char in piece:
                if _begins(automaton, text[-1:] or " ", char) or _HEAD_ENDS.match(text[-1:]):
                    starts.append(len(text))
                text += char
            starts = [
                at for at in starts if any(one.match(text, at, partial=True) for one in patterns)
            ]
            yield len(text) - starts[0] if starts else 0

    return holds


def _behind(pattern: str, head: str) -> str:
    """``pattern`` for `regex`, which finds what comes behind ``head``."""
    flag = "(?i)" if pattern.startswith("(?i)") else ""
    before = f"(?<={head.removeprefix(flag)})" if head else ""
    plain = flag + before + pattern[len(head) or len(flag) :]
    return re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", plain)


def leaks(way: Way, exact: Way, samples: Sequence[str]) -> int:
    """Samples of which a character shows that the filter holds, fed character by character behind a word."""
    lead = "It is "
    fed = [[*lead, *sample] for sample in samples]
    return sum(
        any(hold < needed for hold, needed in zip(way(one), exact(one), strict=True)) for one in fed
    )


def measured(way: Way, answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """The figures of ``way``."""
    held: list[int] = []
    first = 0
    began = time.process_time()
    for pieces in answers:
        end, shown = 0, None
        for number, hold in enumerate(way(pieces), 1):
            end += len(pieces[number - 1])
            held.append(hold)
            if shown is None and hold < end:
                shown = number
        first = max(first, shown or len(pieces))
    took = time.process_time() - began
    held.sort()
    return {
        "hold_p50": held[len(held) // 2],
        "hold_p99": held[len(held) * 99 // 100],
        "first_text_pieces": first,
        "us_per_piece": round(took / len(held) * 1e6, 1),
    }


def main() -> None:
    """Reads the answers and prints the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    read = [path.read_text() for path in parser.parse_args().files]
    answers = [_PIECE.findall(text) for text in read or _ordinary()]
    rules = watched()
    automaton = Automaton(rules)
    known = {rule.id for rule in rules}
    samples = [text for rule, text in FOUND.items() if rule in known]
    ways = {
        "automaton": by_automaton(automaton),
        "last start": by_start(automaton, last=True),
        "first start": by_start(automaton, last=False),
        "partial": by_partial(rules, automaton),
    }
    figures = {
        name: {**measured(way, answers), "leaks": leaks(way, ways["automaton"], samples)}
        for name, way in ways.items()
    }
    print(
        json.dumps(
            {"pieces": sum(map(len, answers)), "samples": len(samples), "ways": figures}, indent=1
        )
    )


def _ordinary() -> Iterator[str]:
    return islice(texts(1, 300), 120)


if __name__ == "__main__":
    main()
