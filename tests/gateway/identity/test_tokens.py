"""JSON Web Tokens without I/O: each attack has its refusal."""

import base64
import hmac
import json
from typing import Any

import jwt
import pytest

from gateway.identity.tokens import KeyMissing, caller_of_token, issuer_of, key_set
from sluice.errors import Unauthenticated
from sluice.settings import JwtSettings
from tests.gateway.kit.issuer import AUDIENCE, NAME, Issuer

ISSUER, STRANGER = Issuer(), Issuer()
KEYS = key_set(ISSUER.jwks())
SETTINGS = JwtSettings(issuer=NAME, audience=AUDIENCE, jwks="file", leeway_s=30)
NOW = 1_000_000.0
DEEP = ".".join([base64.urlsafe_b64encode(b"[" * 3000).decode()] * 2) + ".AAAA"


def caller(token: str, now: float = NOW) -> Any:
    return caller_of_token(token, SETTINGS, KEYS, now)


def refused(token: str, now: float = NOW) -> Unauthenticated:
    with pytest.raises(Unauthenticated) as found:
        caller(token, now)
    assert token not in found.value.message
    return found.value


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def test_a_token_names_tenant_and_roles() -> None:
    found, until = caller(ISSUER.token(exp=NOW + 60, roles=["operator", "of-another-service"]))
    assert (found.tenant, found.roles, until) == ("acme", {"operator"}, NOW + 90)
    assert caller(ISSUER.token(exp=NOW + 60))[0].roles == {"caller"}
    assert caller(ISSUER.token(exp=NOW + 60, roles="auditor caller"))[0].roles == {
        "auditor",
        "caller",
    }
    assert caller(ISSUER.token(exp=NOW + 60, roles=[]))[0].roles == frozenset()


def test_times_hold_but_for_clocks_that_are_apart() -> None:
    token = ISSUER.token(exp=NOW, nbf=NOW - 10)
    assert caller(token, NOW + 29)
    assert caller(token, NOW - 39)
    late = refused(token, NOW + 31)
    assert late.metadata["problem"] == "TOKEN_EXPIRED"
    assert "31 s ago" in late.message
    assert "another 31 s" in refused(token, NOW - 41).message


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "another"},
        {"aud": None},
        {"iss": "https://evil.example.org"},
        {"exp": None},
        {"exp": "tomorrow"},
        {"exp": float("inf")},
        {"exp": float("nan")},
        {"exp": 10**400},
        {"nbf": 10**400},
        {"tenant": None},
        {"tenant": "a.b"},
        {"tenant": ["acme"]},
    ],
)
def test_wrong_claims_are_refused(claims: dict[str, Any]) -> None:
    token = ISSUER.token(**{"exp": NOW + 60, **claims})
    assert refused(token).metadata["problem"] in ("TOKEN_INVALID", "TOKEN_EXPIRED")


def test_a_token_without_a_signature_is_refused() -> None:
    claims = {"iss": NAME, "aud": AUDIENCE, "exp": NOW + 60, "tenant": "acme"}
    for algorithm in ("none", "None", "nOnE"):
        token = f"{part({'alg': algorithm, 'kid': 'key-1'})}.{part(claims)}."
        assert "algorithm" in refused(token).message
    assert "algorithm" in refused(jwt.encode(claims, "", "none", headers={"kid": "key-1"})).message


def test_a_public_key_used_as_a_secret_is_refused() -> None:
    claims = {"iss": NAME, "aud": AUDIENCE, "exp": NOW + 60, "tenant": "acme"}
    head = f"{part({'alg': 'HS256', 'kid': 'key-1'})}.{part(claims)}"
    secret = json.dumps(ISSUER.jwks()["keys"][0]).encode()
    signature = hmac.digest(secret, head.encode(), "sha256")
    token = f"{head}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"
    assert "algorithm" in refused(token).message


def test_another_key_and_changed_claims_are_refused() -> None:
    assert "Signature" in refused(STRANGER.token(exp=NOW + 60)).message
    header, _, signature = ISSUER.token(exp=NOW + 60).split(".")
    claims = {"iss": NAME, "aud": AUDIENCE, "exp": NOW + 60, "tenant": "other"}
    assert "Signature" in refused(f"{header}.{part(claims)}.{signature}").message


def test_an_algorithm_that_does_not_fit_the_key_is_refused() -> None:
    head, claims, signature = ISSUER.token(exp=NOW + 60).split(".")
    for algorithm in ("RS256", "ES256", "EdDSA"):
        other = part({"alg": algorithm, "kid": "key-1"})
        if other != head:
            message = refused(f"{other}.{claims}.{signature}").message
            assert "does not hold" in message or "algorithm" in message


def test_a_key_that_is_not_known_may_be_new() -> None:
    with pytest.raises(KeyMissing):
        caller(Issuer("key-2").token(exp=NOW + 60))


@pytest.mark.parametrize("text", ["", "x", "a.b.c", "a" * 9000, "..", "é.é.é", DEEP])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(Unauthenticated):
        issuer_of(text)


@pytest.mark.parametrize(
    "jwks", [[], {}, {"keys": []}, {"keys": [{"kty": "oct", "k": "AA"}]}, {"keys": [{"kty": "EC"}]}]
)
def test_what_has_no_public_key_is_no_key_set(jwks: object) -> None:
    with pytest.raises(ValueError, match=r"JWKS|key"):
        key_set(jwks)


def test_symmetric_algorithms_cannot_be_configured() -> None:
    for algorithm in ("none", "HS256"):
        with pytest.raises(ValueError, match="algorithms"):
            JwtSettings(issuer=NAME, audience=AUDIENCE, jwks="x", algorithms=(algorithm,))
    with pytest.raises(ValueError, match="https"):
        JwtSettings(issuer=NAME, audience=AUDIENCE, jwks="http://login.example.org/jwks")
