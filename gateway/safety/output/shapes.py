"""Rules for answers only: canary strings, images that send text to a foreign host, terminal escapes."""

import re
from collections.abc import Sequence
from typing import Final

import re2
from typing_extensions import override

from gateway.safety.findings import Finding, Severity
from gateway.safety.output.automaton import Scanner, WatchedRule

CANARY: Final = "output.canary"
IMAGE: Final = "output.markdown_image"
ANSI: Final = "output.ansi"

_URL: Final = r"(?:[A-Za-z][A-Za-z0-9+.-]{0,20}:)?[/\\]{2}"
IMAGE_PATTERNS: Final = (
    rf"!\[[^\]\n]{{0,300}}\]\([ \t]*<?{_URL}[^)\n]*\)",
    r"!\[[^\]\n]{0,300}\]\[[^\]\n]{0,100}\]",
    rf"(?i)<img\b[^>]*{_URL}[^>]*>",
)
"""Written in place, by reference, and in HTML."""
ANSI_PATTERN: Final = (
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~]?)"
    r"|[\x80-\x9f][0-?]*[ -/]*[@-~]?"
)
_HOST: Final = re.compile(r"[/\\]{2}(?:[^/?#\s)\\]{0,200}@)?([A-Za-z0-9.-]{1,255})")


class ShapeScanner(Scanner):
    """Finds the shapes that are switched on."""

    def __init__(
        self, canaries: Sequence[str], images: bool, image_hosts: Sequence[str], ansi: bool
    ) -> None:
        self._hosts = frozenset(host.lower() for host in image_hosts)
        groups: list[tuple[str, tuple[str, ...], Severity]] = []
        if canaries:
            words = tuple(f"(?i){re2.escape(canary)}" for canary in canaries)
            groups.append((CANARY, words, Severity.CRITICAL))
        if images:
            groups.append((IMAGE, IMAGE_PATTERNS, Severity.HIGH))
        if ansi:
            groups.append((ANSI, (ANSI_PATTERN,), Severity.MEDIUM))
        self.watched = tuple(WatchedRule(rule, patterns) for rule, patterns, _ in groups)
        self._compiled = [
            (rule, re2.compile(pattern), severity)
            for rule, patterns, severity in groups
            for pattern in patterns
        ]

    @override
    def scan(self, text: str) -> list[Finding]:
        return [
            Finding(rule, match.start(), match.end(), severity)
            for rule, pattern, severity in self._compiled
            for match in pattern.finditer(text)
            if rule != IMAGE or not self._known_host(match[0])
        ]

    def _known_host(self, image: str) -> bool:
        hosts = _HOST.findall(image)
        return bool(hosts) and all(host.lower() in self._hosts for host in hosts)
