"""What is looked for in prompts alone: encoded payloads and repetitions.

Payloads in base64, hexadecimal, percent escapes and rot13: decoded one level, to be scanned with the same rules.

Decoded content is never decoded again; a payload of which most is encoded once more is nested. The
decoded length of one text is bounded.

`repetitions` finds what makes a prompt long without content, in linear time.
"""

import base64
import codecs
import re
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import re2

from gateway.safety.patterns import compiled

PAYLOAD_BYTES_MAX: Final = 8 << 10
"""Decoded length of one payload, in characters; what is longer is cut here."""
TOTAL_BYTES_MAX: Final = 32 << 10
"""Decoded length of all payloads of a text, in characters; beyond it nothing is decoded."""

_PEEK_CHARS: Final = 64
_CHARS_OF_BYTE: Final = 8
"""No encoding here takes more characters for a byte."""
_TEXT_SHARE_MIN: Final = 0.9
_TEXT_CHARS_MIN: Final = 8
_NESTED_SHARE: Final = 0.8
_HEX_JUNK: Final = re.compile(rb"\\x|0x|[\s:,]")
ROT13: Final = bytes(ord(codecs.encode(chr(at), "rot13")) if at < 128 else at for at in range(256))


class Encoding(NamedTuple):
    """One way to hide a text.

    Attributes:
        name: its name in findings.
        runs: finds runs. A run is decided a few characters behind its end at most, so repeats need
            no bound.
        decode: decodes a run; raises ValueError if it is not in this encoding.
    """

    name: str
    runs: "re2._Regexp[bytes]"
    decode: Callable[[bytes], bytes]


class Payload(NamedTuple):
    """A text inside a run; empty where the run is a key, a hash, a path or an image.

    Attributes:
        is_cut: whether there is more.
        start: offset of the run, in bytes.
        end: offset behind it, in bytes.
    """

    encoding: str
    text: str
    is_cut: bool
    start: int
    end: int


def payloads_of(data: bytes) -> Iterator[Payload]:
    """Yield what runs in a text hold, until the bound of a text is reached."""
    budget = TOTAL_BYTES_MAX
    for encoding in ENCODINGS:
        for match in encoding.runs.finditer(data):
            text, is_cut = decoded(encoding, match[0], min(PAYLOAD_BYTES_MAX, budget))
            budget -= len(text)
            yield Payload(encoding.name, text, is_cut, *match.span())
            # Whatever a caller sends, decoding ends here; the last payload says that there is more.
            if is_cut and not budget:
                return


def is_nested(data: bytes) -> bool:
    """Return whether most of a decoded text is encoded once more."""
    least = len(data) * _NESTED_SHARE
    runs = (run for encoding in ENCODINGS for run in encoding.runs.finditer(data))
    return any(run.end() - run.start() >= least for run in runs)


def decoded(encoding: Encoding, run: bytes, limit: int) -> tuple[str, bool]:
    """Return the text inside `run` up to `limit`, and whether there is more."""
    # Decode a few characters first: most runs are keys, hashes or images.
    if not _as_text(encoding, run[:_PEEK_CHARS]):
        return "", False
    room = limit * _CHARS_OF_BYTE
    text = _as_text(encoding, run[:room])
    return text[:limit], len(run) > room or len(text) > limit


def _as_text(encoding: Encoding, run: bytes) -> str:
    try:
        text = encoding.decode(run).decode("utf-8", "replace")
    except ValueError:
        return ""
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
        compiled(
            rb"[A-Za-z0-9+/_-]{24,}(?:\r?\n[A-Za-z0-9+/_-]{24,})*"
            rb"(?:\r?\n[A-Za-z0-9+/_-]{1,100}={1,2})?={0,2}"
        ),
        _base64,
    ),
    Encoding(
        "hex",
        compiled(
            rb"(?:[0-9a-fA-F]{2}){12,}|(?:(?:\\x|0x)[0-9a-fA-F]{2}[, ]{0,2}){7,}(?:\\x|0x)[0-9a-fA-F]{2}"
            rb"|(?:[0-9a-fA-F]{2}[ :]){8,}[0-9a-fA-F]{2}"
        ),
        _hex,
    ),
    Encoding(
        "percent",
        compiled(rb"(?:[\w.~+'!,-]{0,32}%[0-9A-Fa-f]{2}){2,}[\w.~+'!,-]{0,32}"),
        _percent,
    ),
)
"""Encodings with runs of their own. Rot13 has none, so the whole text is turned."""
ANY_RUN: Final = compiled(b"|".join(encoding.runs.pattern for encoding in ENCODINGS))
"""Finds the first run of any encoding: most texts have none."""


# Repetitions.

RUN_CHARS_MAX: Final = 2_000
"""Longest repetition of a phrase of up to 256 characters; below 600 the search would miss some."""
_PROBE_CHARS: Final = 24
_STRIDE_CHARS: Final = 256
_PERIOD_MAX: Final = 256
_BLOCK_CHARS: Final = 512


def repetitions(text: str, chars_max: int = RUN_CHARS_MAX) -> Iterator[tuple[int, int]]:
    """Yield stretches longer than `chars_max` in which something of at most 256 characters repeats itself.

    A probe is taken every 256 characters; where it occurs again right behind, that distance is the
    period, and the stretch goes as far as the text equals itself shifted by it. Every character is
    compared a bounded number of times.
    """
    at = 0
    while at + _PROBE_CHARS < len(text):
        probe = text[at : at + _PROBE_CHARS]
        again = text.find(probe, at + 1, at + _PERIOD_MAX + _PROBE_CHARS)
        # Nothing repeats here with a period of 256 or less.
        if again < 0:
            at += _STRIDE_CHARS
            continue
        period = again - at
        end = _equal_until(text, at, period) + period
        start = _equal_from(text, at, period)
        if end - start > chars_max:
            yield start, end
        at = max(end - period, at) + _STRIDE_CHARS


def _equal_until(text: str, at: int, period: int) -> int:
    """Return the end of the stretch that equals itself shifted by `period`."""
    size = _BLOCK_CHARS
    while size:
        if (
            at + period + size <= len(text)
            and text[at : at + size] == text[at + period : at + period + size]
        ):
            at += size
        else:
            size //= 2
    return at


def _equal_from(text: str, at: int, period: int) -> int:
    """Return the start of the stretch that equals itself shifted by `period`."""
    floor = max(0, at - _STRIDE_CHARS)
    while at > floor and text[at - 1] == text[at - 1 + period]:
        at -= 1
    return at
