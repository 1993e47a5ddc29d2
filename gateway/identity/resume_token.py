"""Resume tokens: proof that a gateway of this mesh sent the tokens which a caller resumes with.

Resumed tokens reach the model as its own words, past the rules for prompts. Without a proof a caller could write what
it likes there, control tokens included. So each delta has a keyed hash over the request, the model, the seed and all
token ids up to the end of that delta. The hash runs along with the answer: a delta costs what its own tokens cost.

All gateways of a mesh share the key: an answer goes on at any of them.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import Final

from sluice.wire.tokens import VisibleToken

TOKEN_BYTES: Final = 16
_HIDDEN: Final = 2**32 - 1
"""Stands for a token that is hidden from the caller."""


class ResumeToken:
    """The token of one answer, as far as it has been sent."""

    def __init__(self, key: bytes, context: bytes) -> None:
        self._hash = blake2b(context, key=key, digest_size=TOKEN_BYTES)

    def after(self, token_ids: Sequence[VisibleToken]) -> bytes:
        """The token after the next ``token_ids`` of the answer."""
        ids = array("I", [_HIDDEN if token is None else token for token in token_ids])
        self._hash.update(ids)
        return self._hash.digest()


class ResumeKey:
    """Issues and checks resume tokens."""

    def __init__(self, secret: str) -> None:
        self.use(secret)

    def use(self, secret: str) -> None:
        """Takes another secret; tokens of the former one are not accepted any more."""
        self._key = blake2b(secret.encode()).digest()

    def token(self, fingerprint: bytes, model: str, seed: int) -> ResumeToken:
        """The token at the beginning of an answer to the request with ``fingerprint``; greedy: ``seed`` is 0."""
        return ResumeToken(self._key, fingerprint + seed.to_bytes(8, "big") + model.encode())

    def issued(
        self,
        resume_token: bytes,
        fingerprint: bytes,
        model: str,
        seed: int,
        token_ids: Sequence[VisibleToken],
    ) -> bool:
        """Whether ``resume_token`` was sent with the last of ``token_ids``."""
        expected = self.token(fingerprint, model, seed).after(token_ids)
        return compare_digest(expected, resume_token)
