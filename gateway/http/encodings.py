"""Decode the content-encoding of a request body: gzip alone, within the size limit of a plain body."""

import zlib
from collections.abc import Mapping
from typing import Final

from sluice.errors import InvalidRequest, MessageTooLarge

CONTENT_ENCODING: Final = "content-encoding"
GZIP: Final = "gzip"
_GZIP_NAMES: Final = (GZIP, "x-gzip")
_NAME_CHARS_MAX: Final = 40
"""Most characters of an unknown encoding that an error quotes."""
_GZIP_WBITS: Final = 31
"""Window bits by which zlib reads the header and trailer of gzip."""


class EncodingUnsupported(InvalidRequest, reason="CONTENT_ENCODING_UNSUPPORTED"):
    """The body has an unsupported content-encoding."""


def encoding_of(headers: Mapping[str, str]) -> str:
    """Return the encoding of a body: `GZIP`, or an empty string for a plain body.

    Raises:
        EncodingUnsupported: It is another one.
    """
    name = headers.get(CONTENT_ENCODING, "").strip().lower()
    if name in ("", "identity"):
        return ""
    if name in _GZIP_NAMES:
        return GZIP
    quoted = repr(name[:_NAME_CHARS_MAX])
    raise EncodingUnsupported.of(
        CONTENT_ENCODING, f"{quoted} is not supported; send gzip, or no encoding"
    )


def gunzip(body: bytes, limit: int) -> bytes:
    """Return the decoded body.

    Raises:
        MessageTooLarge: The decoded body has more than `limit` bytes.
        InvalidRequest: The body is not one whole gzip member. Several members are refused: decoding thousands of
            them takes time quadratic in the length of the body.
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
            f"the decoded body has more than {limit} bytes, the limit; send less",
            metadata={"limit_bytes": str(limit)},
        )
    if not member.eof or member.unused_data:
        problem = (
            "the gzip body is truncated, or has data after its end; send one whole gzip member"
        )
        raise InvalidRequest.of(CONTENT_ENCODING, problem)
    return decoded
