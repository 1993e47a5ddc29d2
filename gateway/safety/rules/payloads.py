"""Payloads in base64, hexadecimal, percent escapes and rot13: decoded one level and scanned with the same rules.

Decoded content is never decoded again; a payload of which most is encoded once more is reported as
nested. The decoded bytes of one text are bounded; what is left undecoded is a finding of its own.
"""

import base64
import binascii
import codecs
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import re2

from gateway.safety.findings import Finding, Severity
from gateway.safety.patterns import compiled
from gateway.safety.rules.scanner import Subject
from gateway.safety.rules.spec import Span

PAYLOAD_BYTES_MAX: Final = 8 << 10
"""Decoded bytes of one payload; longer ones are decoded up to here."""
TOTAL_BYTES_MAX: Final = 32 << 10
"""Decoded bytes of all payloads of a text."""

_PEEK_CHARS: Final = 64
_TEXT_SHARE_MIN: Final = 0.9
_TEXT_CHARS_MIN: Final = 8
_HEX_JUNK: Final = re.compile(rb"\\x|0x|[\s:,]")
ROT13: Final = bytes(ord(codecs.encode(chr(at), "rot13")) if at < 128 else at for at in range(256))


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to hide a text."""

    name: str
    hint: str
    """Pattern that occurs in every run; for the pass over all patterns."""
    run: str
    """Pattern of a run, in RE2 syntax. A run is decided a few characters behind its end at most, so
    repeats need no bound.
    """
    decode: Callable[[bytes], bytes]
    """Decodes a run; raises ValueError if it is not in this encoding."""


def payload_of(encoding: Encoding, run: bytes, limit: int) -> tuple[str, bool]:
    """Return the text inside `run` up to `limit`, and whether there is more.

    Keys, hashes, paths and images hold no text.
    """
    # Decode a few characters first: most runs are keys, hashes or images.
    if not _as_text(encoding, run[:_PEEK_CHARS]):
        return "", False
    room = limit * 8  # No encoding here takes more than six characters for a byte.
    text = _as_text(encoding, run[:room])
    return text[:limit], len(run) > room or len(text) > limit


def _as_text(encoding: Encoding, run: bytes) -> str:
    try:
        decoded = encoding.decode(run)
    except (ValueError, binascii.Error):
        return ""
    text = decoded.decode("utf-8", "replace")
    good = sum(char.isprintable() or char in "\n\r\t" for char in text) - text.count("\ufffd")
    enough = len(text) >= _TEXT_CHARS_MIN and good >= _TEXT_SHARE_MIN * len(text)
    return text if enough else ""


def _base64(run: bytes) -> bytes:
    plain = run.translate(bytes.maketrans(b"-_", b"+/"), b"\r\n =")
    return base64.b64decode(plain[: len(plain) - (len(plain) % 4 == 1)] + b"=" * (-len(plain) % 4))


def _hex(run: bytes) -> bytes:
    digits = _HEX_JUNK.sub(b"", run)
    return bytes.fromhex(digits[: len(digits) // 2 * 2].decode())


def _percent(run: bytes) -> bytes:
    return urllib.parse.unquote_to_bytes(run.replace(b"+", b" "))


ENCODINGS: Final = (
    Encoding(
        "base64",
        r"[A-Za-z0-9+/_-]{24}",
        r"[A-Za-z0-9+/_-]{24,}(?:\r?\n[A-Za-z0-9+/_-]{24,})*(?:\r?\n[A-Za-z0-9+/_-]{1,100}={1,2})?={0,2}",
        _base64,
    ),
    Encoding(
        "hex",
        r"[0-9a-fA-F]{24}|\\x[0-9a-fA-F]{2}[, ]{0,2}\\x|0x[0-9a-fA-F]{2}[, ]{0,2}0x"
        r"|[0-9a-fA-F]{2}[ :][0-9a-fA-F]{2}[ :][0-9a-fA-F]{2}[ :][0-9a-fA-F]{2}[ :]",
        r"(?:[0-9a-fA-F]{2}){12,}|(?:(?:\\x|0x)[0-9a-fA-F]{2}[, ]{0,2}){7,}(?:\\x|0x)[0-9a-fA-F]{2}"
        r"|(?:[0-9a-fA-F]{2}[ :]){8,}[0-9a-fA-F]{2}",
        _hex,
    ),
    Encoding(
        "percent",
        r"%[0-9A-Fa-f]{2}[\w.~+'!,-]{0,32}%[0-9A-Fa-f]{2}",
        r"(?:[\w.~+'!,-]{0,32}%[0-9A-Fa-f]{2}){2,}[\w.~+'!,-]{0,32}",
        _percent,
    ),
)
"""Encodings with runs of their own. Rot13 has none, so the whole text is turned."""


HINTS: Final = tuple(encoding.hint for encoding in ENCODINGS)
"""Patterns that the scanner looks for on behalf of this module."""

_NESTED_SHARE: Final = 0.8


class Payloads:
    """The encodings, compiled once.

    Args:
        search: returns the findings in a decoded text, and the `HINTS` that occur in it.
    """

    def __init__(self, search: Callable[[Subject], tuple[list[Finding], list[int]]]) -> None:
        self._search = search
        self._runs = [compiled(encoding.run.encode()) for encoding in ENCODINGS]

    def findings(self, subject: Subject, hints: Iterable[int]) -> list[Finding]:
        """Return the findings in payloads of `subject`; `hints` are those of `HINTS` that occur."""
        budget = TOTAL_BYTES_MAX
        findings: list[Finding] = []
        for hint in hints:
            encoding = ENCODINGS[hint]
            for run, span in _runs_in(subject, self._runs[hint]):
                payload, is_cut = payload_of(encoding, run, min(PAYLOAD_BYTES_MAX, budget))
                if payload:
                    findings.extend(self.inside(payload, encoding.name, span))
                if is_cut:
                    findings.append(Finding("limit.encoded", *span, Severity.MEDIUM))
                budget -= len(payload)
                # Whatever a caller sends, decoding ends here.
                if budget <= 0:
                    return findings
        return findings

    def inside(self, payload: str, name: str, span: Span) -> Iterator[Finding]:
        """Yield the findings in a decoded text, one per family, at the place of the run."""
        subject = Subject(payload)
        inner, hints = self._search(subject)
        for family, severity in _families(inner):
            yield Finding(f"{family}.encoded.{name}", *span, severity)
        # Decoding stops here, or a caller could nest payloads without end.
        if self._is_nested(subject, hints):
            yield Finding("injection.encoded.nested", *span, Severity.MEDIUM)

    def _is_nested(self, subject: Subject, hints: Iterable[int]) -> bool:
        total = len(subject.data) * _NESTED_SHARE
        return any(
            len(run) >= total for hint in hints for run, _ in _runs_in(subject, self._runs[hint])
        )


def _runs_in(subject: Subject, regex: "re2._Regexp[bytes]") -> Iterator[tuple[bytes, Span]]:
    for match in regex.finditer(subject.data):
        start, end = match.span()
        yield subject.data[start:end], (subject.chars(start), subject.chars(end))


def _families(inner: Sequence[Finding]) -> Iterator[tuple[str, Severity]]:
    """Yield the families to report, with their worst severity; a hidden injection is no accident."""
    worst: dict[str, Severity] = {}
    for finding in inner:
        family = finding.rule.split(".", 1)[0]
        worst[family] = max(finding.severity, worst.get(family, Severity.LOW))
    for family, severity in worst.items():
        if severity >= Severity.MEDIUM:
            yield family, max(severity, Severity.HIGH) if family == "injection" else severity
