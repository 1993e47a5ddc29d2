"""Counts what a scan does, so that its cost is bounded by operations and not by a clock."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from gateway.safety import patterns
from gateway.safety.findings import Finding
from gateway.safety.rules import payloads, ruleset, scanner
from gateway.safety.rules.limits import CHARS_MAX
from gateway.safety.rules.ruleset import RuleSet
from gateway.safety.rules.spec import RuleMatch, default_rules


@dataclass
class Work:
    """Counts of one scan.

    Attributes:
        bytes_scanned: that went through a matching engine, counted once for each pass.
        candidates: matches of patterns.
        chars_read: by validators beyond a match.
        bytes_decoded: that came out of encoded payloads.
    """

    bytes_scanned: int = 0
    candidates: int = 0
    chars_read: int = 0
    bytes_decoded: int = 0


class CountedRules:
    """A `RuleSet` whose engines are counted."""

    def __init__(self, specs: Any, max_chars: int = CHARS_MAX) -> None:
        self._work = Work()
        with pytest.MonkeyPatch.context() as patch:
            for module in (scanner, payloads):
                patch.setattr(module, "compiled", self._counted(patterns.compiled))
            self._rules = RuleSet(specs, max_chars=max_chars)

    def scan(self, text: str) -> tuple[list[Finding], Work]:
        self._work.__init__()  # type: ignore[misc]
        work, present, run = self._work, ruleset.Prefilter.present, RuleMatch.run
        payload_of = payloads.payload_of

        def counted_present(self: ruleset.Prefilter, data: bytes) -> Any:
            work.bytes_scanned += len(data)
            return present(self, data)

        def counted_run(self: RuleMatch, pattern: Any, start: int) -> int:
            end = run(self, pattern, start)
            work.chars_read += end - start
            return end

        def counted_payload(*args: Any) -> tuple[str, bool]:
            payload, is_cut = payload_of(*args)
            work.bytes_decoded += len(payload.encode("utf-8", "replace"))
            return payload, is_cut

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ruleset.Prefilter, "present", counted_present)
            patch.setattr(RuleMatch, "run", counted_run)
            patch.setattr(payloads, "payload_of", counted_payload)
            return self._rules.scan(text), Work(**vars(work))

    def _counted(self, compiled: Any) -> Any:
        return lambda *args: _Regex(compiled(*args), self._work)


class _Regex:
    def __init__(self, regex: Any, work: Work) -> None:
        self._regex, self._work = regex, work

    def search(self, data: bytes, at: int) -> Any:
        found = self._regex.search(data, at)
        self._work.bytes_scanned += (found.end() if found else len(data)) - at
        self._work.candidates += found is not None
        return found

    def finditer(self, data: bytes) -> Iterator[Any]:
        self._work.bytes_scanned += len(data)
        yield from self._regex.finditer(data)


@cache
def shipped_rules() -> RuleSet:
    """The default rules, compiled when a test first asks: that takes seconds."""
    return RuleSet(default_rules())


@cache
def counted_rules() -> CountedRules:
    """The same, counted."""
    return CountedRules(default_rules())
