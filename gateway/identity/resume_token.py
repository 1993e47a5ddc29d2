"""Issue and check resume tokens: proof that a gateway of this mesh sent the tokens that a caller resumes with.

Resumed tokens reach the model as its own words, without inspection. Without proof, a caller could send any text there,
control tokens included. So each delta has a keyed hash of the request, the model, the seed and all token ids up to the
end of that delta. The hash is computed incrementally: a delta only adds its own tokens.

All gateways of a mesh share the key, so an answer can be resumed at any of them.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import Final

from sluice.wire.tokens import VisibleToken

TOKEN_BYTES: Final = 16
"""Length of a resume token."""
_HIDDEN: Final = 2**32 - 1
"""Id in the hash of a token that is hidden from the caller."""


class ResumeToken:
    """The resume token of one answer, up to what has been sent."""

    def __init__(self, key: bytes, context: bytes) -> None:
        self._hash = blake2b(context, key=key, digest_size=TOKEN_BYTES)

    def after(self, token_ids: Sequence[VisibleToken]) -> bytes:
        """Add the next tokens of the answer, and return the resume token after them."""
        ids = array("I", [_HIDDEN if token is None else token for token in token_ids])
        self._hash.update(ids)
        return self._hash.digest()


class ResumeKey:
    """The key that issues and checks resume tokens."""

    def __init__(self, secret: str) -> None:
        self.use(secret)

    def use(self, secret: str) -> None:
        """Use another secret; tokens of the previous one are no longer accepted."""
        self._key = blake2b(secret.encode()).digest()

    def token(self, fingerprint: bytes, model: str, seed: int) -> ResumeToken:
        """Return the resume token at the beginning of an answer; `seed` is 0 for greedy sampling."""
        return ResumeToken(self._key, fingerprint + seed.to_bytes(8, "big") + model.encode())

    def issued(
        self,
        resume_token: bytes,
        fingerprint: bytes,
        model: str,
        seed: int,
        token_ids: Sequence[VisibleToken],
    ) -> bool:
        """Return whether this mesh sent `resume_token` with the last of `token_ids`."""
        expected = self.token(fingerprint, model, seed).after(token_ids)
        return compare_digest(expected, resume_token)
