"""API keys and JSON Web Tokens: whose call a key makes, by the records of the mesh, and a token, by its issuer's keys.

PyJWT is imported where it is used: it brings cryptography, and few gateways see a token.
"""

from collections.abc import Mapping
from hmac import compare_digest
from math import inf
from typing import Any, Final

from gateway.identity.caller import Caller
from sluice.defaults import CALLER, ROLES
from sluice.errors import Unauthenticated
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings.identity import JwtSettings
from sluice.settings.limits import RateLimits
from sluice.wire.api_keys import digest_of, id_of
from sluice.wire.subjects import is_token

TOKEN_CHARS_MAX: Final = 8192
_TIME_MAX: Final = 1e12
"""Thirty thousand years, seconds."""
_KEY_TYPES: Final = ("RSA", "EC", "OKP")
_OPTIONS: Final[Any] = {
    "require": ["exp", "iss", "aud"],
    # The times are compared here, with the gateway's clock as an argument.
    **dict.fromkeys(("verify_exp", "verify_nbf", "verify_iat"), False),
}


_HELP = "; `sluice keys list` shows those of this mesh, `sluice keys create` makes one"


def caller_of_key(
    text: str, records: Mapping[str, ApiKeyRecord], unix_s: float
) -> tuple[Caller, float]:
    """Whose call the key ``text`` makes, and until when, seconds since the Unix epoch.

    The id finds the record; of the secret only a hash is compared, in a time that does not depend on it. Whether a key
    has been revoked is told to its owner alone.

    Args:
        records: by id.
        unix_s: now, since the Unix epoch.

    Raises:
        Unauthenticated: it is no key of the mesh, or none any more.
    """
    key_id = id_of(text)
    if key_id is None:
        raise Unauthenticated.of(
            "KEY_INVALID", "the API key is not whole: copy all of it, slc_ and what follows"
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
    """Return the caller with the key of a job of ``tenant``, as the key is now.

    Raises:
        Unauthenticated: It is no key of the tenant, or none any more.
    """
    record = records.get(key_id)
    if record is None or record.tenant != tenant:
        raise Unauthenticated.of(
            "KEY_INVALID", f"there is no API key {key_id} any more: use another"
        )
    return caller_of_record(key_id, record, unix_s)[0]


def caller_of_record(key_id: str, record: ApiKeyRecord, unix_s: float) -> tuple[Caller, float]:
    """Return the caller with a key, and until when it is one; raise Unauthenticated when it is none any more."""
    if record.revoke_unix_ms:
        raise Unauthenticated.of("KEY_REVOKED", f"the API key {key_id} was revoked: use another")
    until = record.expire_unix_ms / 1000 or inf
    if unix_s >= until:
        raise Unauthenticated.of("KEY_EXPIRED", f"the API key {key_id} has expired: use another")
    limits = RateLimits(
        requests_per_minute=record.requests_per_minute or None,
        tokens_per_minute=record.tokens_per_minute or None,
    )
    return Caller(record.tenant, frozenset(record.roles), key_id, limits), until


class KeyMissing(Unauthenticated):
    """The issuer's keys, as far as they are known, have none of this id: it may have a new one."""


KeySet = Mapping[str, Any]
"""Public keys by their id (`kid`)."""


def key_set(jwks: object) -> KeySet:
    """The public signature keys of a JWKS (RFC 7517); others are left out.

    Raises:
        ValueError: it is none, or has no such key.
    """
    import jwt

    found = jwks.get("keys") if isinstance(jwks, dict) else None
    if not isinstance(found, list):
        raise ValueError('is no JWKS: it has no list "keys"')
    keys = {}
    for one in found:
        if not isinstance(one, dict) or one.get("kty") not in _KEY_TYPES or one.get("use") == "enc":
            continue
        try:
            keys[str(one.get("kid", ""))] = jwt.PyJWK(one).key
        except jwt.PyJWTError as error:
            raise ValueError(f"has a key that cannot be read: {type(error).__name__}") from error
    if not keys:
        raise ValueError("has no public key for signatures")
    return keys


def issuer_of(token: str) -> str:
    """Who says that it made ``token``; nothing of it is proven yet.

    Raises:
        Unauthenticated: it is no token.
    """
    import jwt

    if len(token) > TOKEN_CHARS_MAX:
        raise _invalid(f"is longer than {TOKEN_CHARS_MAX} characters")
    try:
        claims = jwt.decode(token, options={"verify_signature": False})
    except (jwt.PyJWTError, RecursionError):  # the second for JSON that is nested deeply
        raise _invalid("is neither an API key (slc_...) nor a JSON Web Token") from None
    return str(claims.get("iss", ""))


def caller_of_token(
    token: str, settings: JwtSettings, keys: KeySet, unix_s: float
) -> tuple[Caller, float]:
    """Whose call ``token`` of the issuer of ``settings`` makes, and until when, seconds since the Unix epoch.

    Raises:
        KeyMissing: ``keys`` do not have the one that signed it.
        Unauthenticated: it is not valid, or not valid now.
    """
    claims = _verified(token, settings, keys)
    until = _time(claims, "exp") + settings.leeway_s
    if unix_s >= until:
        late_s = unix_s - until + settings.leeway_s
        raise Unauthenticated.of(
            "TOKEN_EXPIRED",
            f"the token expired {late_s:.0f} s ago by the gateway's clock: get another",
        )
    if "nbf" in claims and unix_s < (start := _time(claims, "nbf")) - settings.leeway_s:
        raise _invalid(f"is not valid for another {start - unix_s:.0f} s by the gateway's clock")
    return Caller(_tenant(claims, settings), _roles(claims, settings)), until


def _verified(token: str, settings: JwtSettings, keys: KeySet) -> Mapping[str, Any]:
    """The claims, with a signature, an issuer and an audience that are right."""
    import jwt

    try:
        header = jwt.get_unverified_header(token)
        if header.get("alg") not in settings.algorithms:
            allowed = ", ".join(settings.algorithms)
            raise _invalid(f"is signed with an algorithm that is not allowed; these are: {allowed}")
        key_id = str(header.get("kid", ""))
        key = next(iter(keys.values())) if not key_id and len(keys) == 1 else keys.get(key_id)
        if key is None:
            raise KeyMissing.of(
                "TOKEN_INVALID", "the token is signed with a key that its issuer does not have"
            )
        return jwt.decode(
            token,
            key,
            algorithms=list(settings.algorithms),
            audience=settings.audience,
            issuer=settings.issuer,
            options=_OPTIONS,
        )
    except jwt.InvalidAudienceError:
        raise _invalid(f"is not for the audience {settings.audience!r}") from None
    except jwt.MissingRequiredClaimError as error:
        raise _invalid(f"has no claim {error.claim!r}") from None
    # A key of another kind than the algorithm of the token's head: TypeError.
    except (jwt.PyJWTError, RecursionError, TypeError, ValueError) as error:
        raise _invalid(f"does not hold: {type(error).__name__}") from None


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN is not in the range, nor is a number that no float can hold.
    if not is_number or not abs(value) <= _TIME_MAX:
        raise _invalid(f"has a claim {name!r} that is no time")
    return float(value)


def _tenant(claims: Mapping[str, Any], settings: JwtSettings) -> str:
    tenant = claims.get(settings.tenant_claim)
    if not isinstance(tenant, str) or not is_token(tenant):
        raise _invalid(
            f"names no tenant: its claim {settings.tenant_claim!r} must be 1 to 64 letters, digits, '-' and '_'"
        )
    return tenant


def _roles(claims: Mapping[str, Any], settings: JwtSettings) -> frozenset[str]:
    """Words that are no roles belong to other services."""
    if settings.roles_claim not in claims:
        return frozenset({CALLER})
    given = claims[settings.roles_claim]
    words = given.split() if isinstance(given, str) else given if isinstance(given, list) else ()
    return frozenset(role for role in ROLES if role in words)


def _invalid(problem: str) -> Unauthenticated:
    return Unauthenticated.of("TOKEN_INVALID", f"the token {problem}")
