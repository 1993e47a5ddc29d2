"""An issuer of JSON Web Tokens, and API keys as `sluice keys` makes them."""

import json
import time
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings import JwtSettings
from sluice.wire.api_keys import digest_of, new_key
from sluice.wire.bucket import Bucket

NAME: Final = "https://login.example.org"
AUDIENCE: Final = "sluice"


class Issuer:
    """Signs with one key on P-256."""

    def __init__(self, key_id: str = "key-1") -> None:
        self.key_id = key_id
        self._key = ec.generate_private_key(ec.SECP256R1())

    def jwks(self) -> dict[str, Any]:
        public = json.loads(ECAlgorithm.to_jwk(self._key.public_key()))
        return {"keys": [{**public, "kid": self.key_id, "use": "sig"}]}

    def written(self, path: Path) -> JwtSettings:
        path.write_text(json.dumps(self.jwks()))
        return JwtSettings(issuer=NAME, audience=AUDIENCE, jwks=str(path))

    def token(self, tenant: str = "acme", **claims: Any) -> str:
        """A token that holds for an hour; a claim of None is left out."""
        all_claims = {
            "iss": NAME,
            "aud": AUDIENCE,
            "exp": time.time() + 3600,
            "tenant": tenant,
            **claims,
        }
        return self.sign({name: value for name, value in all_claims.items() if value is not None})

    def sign(self, claims: dict[str, Any], *, names_key: bool = True) -> str:
        """A token with exactly these claims."""
        headers = {"kid": self.key_id} if names_key else None
        return jwt.encode(claims, self._key, "ES256", headers=headers)


def key_record(text: str, tenant: str, *roles: str, **fields: Any) -> ApiKeyRecord:
    return ApiKeyRecord(digest=digest_of(text), tenant=tenant, roles=roles or ("caller",), **fields)


async def make_key(bucket: Bucket, tenant: str, *roles: str) -> tuple[str, str]:
    """The id and the text of a key in ``bucket``."""
    made = new_key()
    await bucket.write(made.id, key_record(made.text, tenant, *roles))
    return made


def bearer(credential: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {credential}"),)
