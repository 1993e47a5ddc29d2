"""Counts what a scan does, so that its cost is bounded by operations and not by a clock."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from gateway.safety import patterns
from gateway.safety.findings import Finding
from gateway.safety.rules import payloads, ruleset
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import RuleMatch, default_rules


@dataclass
class Work:
    """Counts of one scan.

    Attributes:
        bytes_scanned: that patterns were searched in, counted once for each search.
        candidates: matches of patterns.
        chars_read: by validators beyond a match.
        bytes_decoded: that came out of encoded payloads.
    """

    bytes_scanned: int = 0
    candidates: int = 0
    chars_read: int = 0
    bytes_decoded: int = 0


class CountedRules:
    """A `RuleSet` whose searches are counted."""

    def __init__(self, specs: Any) -> None:
        self._work = Work()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ruleset, "compiled", self._counted)
            self._rules = RuleSet(specs)

    def scan(self, text: str) -> tuple[list[Finding], Work]:
        self._work.__init__()  # type: ignore[misc]
        work, run, decoded = self._work, RuleMatch.run, payloads.decoded

        def counted_run(self: RuleMatch, pattern: Any, start: int) -> int:
            end = run(self, pattern, start)
            work.chars_read += end - start
            return end

        def counted_payload(*args: Any) -> tuple[str, bool]:
            payload, is_cut = decoded(*args)
            work.bytes_decoded += len(payload.encode("utf-8", "replace"))
            return payload, is_cut

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RuleMatch, "run", counted_run)
            patch.setattr(payloads, "decoded", counted_payload)
            return self._rules.scan(text), Work(**vars(work))

    def _counted(self, pattern: bytes) -> Any:
        return _Regex(patterns.compiled(pattern), self._work)


class _Regex:
    def __init__(self, regex: Any, work: Work) -> None:
        self._regex, self._work = regex, work

    def search(self, data: bytes, at: int) -> Any:
        found = self._regex.search(data, at)
        self._work.bytes_scanned += (found.end() if found else len(data)) - at
        self._work.candidates += found is not None
        return found


@cache
def shipped_rules() -> RuleSet:
    """The default rules."""
    return RuleSet(default_rules())


@cache
def counted_rules() -> CountedRules:
    """The same, counted."""
    return CountedRules(default_rules())
