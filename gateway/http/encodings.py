"""The content-encoding of a request: gzip is decoded, within the limit that holds for bodies as they are."""

import zlib
from collections.abc import Mapping
from typing import Final

from sluice.errors import InvalidRequest, MessageTooLarge

CONTENT_ENCODING: Final = "content-encoding"
GZIP: Final = "gzip"
_GZIP_NAMES: Final = (GZIP, "x-gzip")
_NAME_CHARS_MAX: Final = 40
"""Characters of an unknown encoding that an error quotes."""
_GZIP_WBITS: Final = 31
"""Makes zlib read the header and trailer of gzip."""


class EncodingUnsupported(InvalidRequest, reason="CONTENT_ENCODING_UNSUPPORTED"):
    """The body is encoded in a way that is not decoded."""


def encoding_of(headers: Mapping[str, str]) -> str:
    """Return the encoding of a body: `GZIP`, or nothing where it is sent as it is.

    Raises:
        EncodingUnsupported: it is another one.
    """
    name = headers.get(CONTENT_ENCODING, "").strip().lower()
    if name in ("", "identity"):
        return ""
    if name in _GZIP_NAMES:
        return GZIP
    raise encoding_unsupported(
        f"{name[:_NAME_CHARS_MAX]!r} is not served; send gzip, or no encoding"
    )


def encoding_unsupported(problem: str) -> EncodingUnsupported:
    """Return the error for an encoding, with what to do in ``problem``."""
    wrong = InvalidRequest.of(CONTENT_ENCODING, problem)
    return EncodingUnsupported(wrong.message, violations=wrong.violations)


def gunzip(body: bytes, limit: int) -> bytes:
    """Return the decoded body.

    Raises:
        MessageTooLarge: it has more than ``limit`` bytes.
        InvalidRequest: it is no gzip, is cut, or goes on behind its end: one that has thousands of members would cost
            the square of its length.
    """
    member = zlib.decompressobj(_GZIP_WBITS)
    try:
        decoded = member.decompress(body, limit + 1)
    except zlib.error:
        raise InvalidRequest.of(
            CONTENT_ENCODING, "the body is not gzip; leave the header out"
        ) from None
    if len(decoded) > limit:
        raise MessageTooLarge(
            f"the body has more than {limit} bytes when it is decoded, which is the limit",
            metadata={"limit_bytes": str(limit)},
        )
    if not member.eof or member.unused_data:
        problem = "the gzip body is cut, or goes on behind its end; send one whole gzip member"
        raise InvalidRequest.of(CONTENT_ENCODING, problem)
    return decoded
