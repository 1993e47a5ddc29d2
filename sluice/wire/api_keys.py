"""API keys: how they are written, and what is kept of them.

A key is `slc_<id>_<secret>`: 12 characters that name it and may be shown, and 56 with 248 random bits and a
checksum, so that a key with a typing error is told from one that is unknown. Such a secret cannot be
guessed, so a plain SHA-256 is kept of it.
"""

import base64
import hashlib
import re
import secrets
import zlib
from typing import Final, NamedTuple

PREFIX: Final = "slc_"
_SECRET_BYTES: Final = 31
_ID_BYTES: Final = 6
_KEY: Final = re.compile(r"slc_([0-9a-f]{12})_([a-z2-7]{56})")


class NewKey(NamedTuple):
    """A key that has just been made; `text` is shown once and kept nowhere."""

    id: str
    text: str


def new_key() -> NewKey:
    """Return a new key."""
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_bytes(_SECRET_BYTES)
    encoded = base64.b32encode(secret + _checksum(key_id, secret)).decode().lower()
    return NewKey(key_id, f"{PREFIX}{key_id}_{encoded}")


def id_of(text: str) -> str | None:
    """Return the id of the key `text`; None if it is not a whole key."""
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    key_id, encoded = match.groups()
    decoded = base64.b32decode(encoded.upper())
    secret, checksum = decoded[:_SECRET_BYTES], decoded[_SECRET_BYTES:]
    return key_id if checksum == _checksum(key_id, secret) else None


def digest_of(text: str) -> bytes:
    """Return the digest that is stored of the key `text`."""
    return hashlib.sha256(text.encode()).digest()


def _checksum(key_id: str, secret: bytes) -> bytes:
    return zlib.crc32(key_id.encode() + secret).to_bytes(4)
