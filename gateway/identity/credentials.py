"""Verify API keys by the records of the mesh, and JSON Web Tokens by the keys of their issuer.

PyJWT is imported where it is used, because it imports cryptography, and few gateways get tokens.
"""

from collections.abc import Mapping
from hmac import compare_digest
from math import inf
from typing import Any, Final

from gateway.identity.caller import Caller
from sluice.defaults import CALLER, ROLES
from sluice.errors import Unauthenticated
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings.identity import ALGORITHMS, JwtSettings
from sluice.settings.limits import RateLimits
from sluice.wire.api_keys import digest_of, id_of
from sluice.wire.subjects import is_token

TOKEN_CHARS_MAX: Final = 8192
"""Most characters of a token."""
_TIME_MAX: Final = 1e12
"""Largest time in a token, in seconds: thirty thousand years."""
_KEY_TYPES: Final = ("RSA", "EC", "OKP")
"""Types of public keys; symmetric ones are ignored."""
_OPTIONS: Final[Any] = {
    "require": ["exp", "iss", "aud"],
    # Times are compared in this module, where the clock is an argument.
    **dict.fromkeys(("verify_exp", "verify_nbf", "verify_iat"), False),
}


_HELP = "; `sluice keys list` shows those of this mesh, `sluice keys create` makes one"


def caller_of_key(
    text: str, records: Mapping[str, ApiKeyRecord], unix_s: float
) -> tuple[Caller, float]:
    """Return the caller with the API key `text`, and when the key expires, in Unix seconds; `inf` for never.

    The id selects the record; hashes of the secret are compared in constant time. Only a caller with the right secret
    learns that a key was revoked.

    Args:
        text: The API key.
        records: Records of API keys by id.
        unix_s: Current time, in seconds since the Unix epoch.

    Raises:
        Unauthenticated: The key is invalid, expired or revoked.
    """
    key_id = id_of(text)
    if key_id is None:
        raise Unauthenticated.of(
            "KEY_INVALID", "the API key is incomplete: copy all of it, from slc_ on"
        )
    record = records.get(key_id)
    if record is None or not compare_digest(record.digest, digest_of(text)):
        raise Unauthenticated.of(
            "KEY_INVALID", f"there is no API key {key_id} with this secret{_HELP}"
        )
    return caller_of_record(key_id, record, unix_s)


def caller_of_id(
    key_id: str, tenant: str, records: Mapping[str, ApiKeyRecord], unix_s: float
) -> Caller:
    """Return the caller with the API key of a job of `tenant`.

    Raises:
        Unauthenticated: The key is not one of the tenant, or is expired or revoked.
    """
    record = records.get(key_id)
    if record is None or record.tenant != tenant:
        raise Unauthenticated.of(
            "KEY_INVALID", f"there is no API key {key_id} any more; use another"
        )
    return caller_of_record(key_id, record, unix_s)[0]


def caller_of_record(key_id: str, record: ApiKeyRecord, unix_s: float) -> tuple[Caller, float]:
    """Return the caller with a key, and when the key expires; raise Unauthenticated if it is expired or revoked."""
    # Checked after the secret: only the owner of a key learns that it was revoked.
    if record.revoke_unix_ms:
        raise Unauthenticated.of("KEY_REVOKED", f"the API key {key_id} was revoked; use another")
    until = record.expire_unix_ms / 1000 or inf
    if unix_s >= until:
        raise Unauthenticated.of("KEY_EXPIRED", f"the API key {key_id} has expired; use another")
    limits = RateLimits(
        requests_per_minute=record.requests_per_minute or None,
        tokens_per_minute=record.tokens_per_minute or None,
    )
    return Caller(record.tenant, frozenset(record.roles), key_id, limits), until


class KeyMissing(Unauthenticated):
    """The token is signed with a key that is not known yet: its issuer may have a new one."""


KeySet = Mapping[str, Any]
"""Public keys by their id (`kid`)."""


def key_set(jwks: object) -> KeySet:
    """Return the public signature keys of a JWKS (RFC 7517).

    Raises:
        ValueError: It is not a JWKS, has no such key, or has one that cannot be read.
    """
    import jwt

    entries = jwks.get("keys") if isinstance(jwks, dict) else None
    if not isinstance(entries, list):
        raise ValueError('is not a JWKS: it has no list "keys"')
    keys = {}
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("kty") not in _KEY_TYPES:
            continue
        if entry.get("use") == "enc":
            continue
        try:
            keys[str(entry.get("kid", ""))] = jwt.PyJWK(entry).key
        except jwt.PyJWTError as error:
            raise ValueError(f"has a key that cannot be read: {type(error).__name__}") from error
    if not keys:
        raise ValueError("has no public key for signatures")
    return keys


def issuer_of(token: str) -> str:
    """Return the issuer that `token` names, without verifying the token.

    Raises:
        Unauthenticated: It is not a token.
    """
    import jwt

    if len(token) > TOKEN_CHARS_MAX:
        raise _invalid(f"is longer than {TOKEN_CHARS_MAX} characters")
    try:
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, RecursionError):  # RecursionError: deeply nested JSON
        raise _invalid("is neither an API key (slc_...) nor a JSON Web Token") from None
    return str(claims.get("iss", ""))


def caller_of_token(
    token: str, settings: JwtSettings, keys: KeySet, unix_s: float
) -> tuple[Caller, float]:
    """Return the caller with a token, and when it expires, in seconds since the Unix epoch.

    Args:
        token: The token.
        settings: Settings of its issuer.
        keys: Public keys of its issuer.
        unix_s: Current time, in seconds since the Unix epoch.

    Raises:
        KeyMissing: `keys` lack the key of the signature.
        Unauthenticated: The token is invalid, expired or not yet valid.
    """
    claims = _verify(token, settings, keys)
    expires_s = _time(claims, "exp") + settings.leeway_s
    if unix_s >= expires_s:
        late_s = unix_s - expires_s + settings.leeway_s
        raise Unauthenticated.of(
            "TOKEN_EXPIRED",
            f"the token expired {late_s:.0f} s ago by the gateway's clock; get another",
        )
    if "nbf" in claims and unix_s < (start := _time(claims, "nbf")) - settings.leeway_s:
        raise _invalid(f"is not valid for another {start - unix_s:.0f} s by the gateway's clock")
    tenant = claims.get(settings.tenant_claim)
    if not isinstance(tenant, str) or not is_token(tenant):
        problem = "must be 1 to 64 letters, digits, '-' and '_'"
        raise _invalid(f"names no tenant: its claim {settings.tenant_claim!r} {problem}")
    return Caller(tenant, _roles(claims, settings)), expires_s


def _verify(token: str, settings: JwtSettings, keys: KeySet) -> Mapping[str, Any]:
    """Return the claims of a token after verifying its signature, issuer and audience."""
    import jwt

    try:
        header = jwt.get_unverified_header(token)
        if header.get("alg") not in ALGORITHMS:
            allowed = ", ".join(ALGORITHMS)
            raise _invalid(f"is signed with an algorithm that is not allowed; these are: {allowed}")
        key_id = str(header.get("kid", ""))
        key = keys.get(key_id)
        if not key_id and len(keys) == 1:  # a token need not name the only key
            key = next(iter(keys.values()))
        if key is None:
            raise KeyMissing.of(
                "TOKEN_INVALID", "the token is signed with a key that its issuer does not have"
            )
        return jwt.decode(
            token,
            key,
            algorithms=ALGORITHMS,
            audience=settings.audience,
            issuer=settings.issuer,
            options=_OPTIONS,
        )
    except jwt.InvalidAudienceError:
        raise _invalid(f"is not for the audience {settings.audience!r}") from None
    except jwt.MissingRequiredClaimError as error:
        raise _invalid(f"has no claim {error.claim!r}") from None
    # TypeError: the key is not of the type that the token's algorithm needs.
    except (jwt.PyJWTError, RecursionError, TypeError, ValueError) as error:
        raise _invalid(f"does not hold: {type(error).__name__}") from None


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Written so that NaN is out of range, as is an integer that no float can hold.
    if not is_number or not abs(value) <= _TIME_MAX:
        raise _invalid(f"has a claim {name!r} that is not a time")
    return float(value)


def _roles(claims: Mapping[str, Any], settings: JwtSettings) -> frozenset[str]:
    """Return the roles in the claims; other words in the claim are ignored, they belong to other services."""
    # A token without the claim may use models; one with an empty claim may do nothing.
    if settings.roles_claim not in claims:
        return frozenset({CALLER})
    words = claims[settings.roles_claim]
    if isinstance(words, str):
        words = words.split()
    elif not isinstance(words, list):
        words = []
    return frozenset(role for role in ROLES if role in words)


def _invalid(problem: str) -> Unauthenticated:
    return Unauthenticated.of("TOKEN_INVALID", f"the token {problem}")
