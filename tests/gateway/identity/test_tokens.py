"""JSON Web Tokens without I/O: each attack has its refusal."""

import base64
import hmac
import json
from typing import Any

import jwt
import pytest

from gateway.identity.credentials import KeyMissing, caller_of_token, issuer_of, key_set
from sluice.errors import Unauthenticated
from sluice.settings import JwtSettings
from tests.gateway.kit.issuer import AUDIENCE, NAME, Issuer

ISSUER, STRANGER = Issuer(), Issuer()
KEYS = key_set(ISSUER.jwks())
SETTINGS = JwtSettings(issuer=NAME, audience=AUDIENCE, jwks="file")
NOW = 1_000_000.0
CLAIMS = {"iss": NAME, "aud": AUDIENCE, "exp": NOW + 60, "tenant": "acme"}
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
    found, _ = caller(ISSUER.token(exp=NOW + 60, roles="auditor caller"))
    assert found.roles == {"auditor", "caller"}


def test_times_have_the_leeway() -> None:
    token = ISSUER.token(exp=NOW, nbf=NOW - 10)
    assert caller(token, NOW + 29.999)[1] == NOW + 30
    assert caller(token, NOW - 40)
    late = refused(token, NOW + 30)
    assert late.metadata["problem"] == "TOKEN_EXPIRED"
    assert "30 s ago" in late.message
    assert refused(token, NOW - 40.001)
    assert "another 31 s" in refused(token, NOW - 41).message
    endless = ISSUER.token(exp=1e12, nbf=-1e12)
    assert caller(endless)[1] == 1e12 + 30


@pytest.mark.parametrize(
    "value", [1e12 + 1, -1e12 - 1, True, None, [5], "soon", float("inf"), float("nan"), 10**400]
)
@pytest.mark.parametrize("name", ["exp", "nbf"])
def test_a_time_is_a_number_in_reach(name: str, value: object) -> None:
    said = refused(ISSUER.sign({**CLAIMS, name: value})).message
    assert f"claim {name!r} that is not a time" in said or f"no claim {name!r}" in said


def test_a_claim_that_must_be_there_is_named() -> None:
    for name in ("exp", "aud", "iss"):
        token = ISSUER.token(**{"exp": NOW + 60, name: None})
        assert f"no claim {name!r}" in refused(token).message
    assert "audience 'sluice'" in refused(ISSUER.token(exp=NOW + 60, aud="another")).message


def test_a_token_without_a_key_id_is_of_the_only_key() -> None:
    nameless = ISSUER.sign(CLAIMS, names_key=False)
    assert caller(nameless)[0].tenant == "acme"
    two = {**KEYS, **key_set(Issuer("key-2").jwks())}
    with pytest.raises(KeyMissing):
        caller_of_token(nameless, SETTINGS, two, NOW)
    # One that names its key is of that one, also where there is only one.
    with pytest.raises(KeyMissing):
        caller(Issuer("key-2").token(exp=NOW + 60))
    assert caller_of_token(ISSUER.token(exp=NOW + 60), SETTINGS, two, NOW)


def test_claims_have_the_names_that_the_operator_gives_them() -> None:
    settings = SETTINGS.model_copy(update={"tenant_claim": "org", "roles_claim": "groups"})
    token = ISSUER.token(exp=NOW + 60, org="team", groups=["auditor"], roles=["operator"])
    found, _ = caller_of_token(token, settings, KEYS, NOW)
    assert (found.tenant, found.roles) == ("team", {"auditor"})
    with pytest.raises(Unauthenticated, match="'org' must be"):
        caller_of_token(ISSUER.token(exp=NOW + 60), settings, KEYS, NOW)


@pytest.mark.parametrize("roles", [5, None, [], {"operator": 1}, "", ["OPERATOR"], "operators"])
def test_what_names_no_role_gives_none(roles: object) -> None:
    assert caller(ISSUER.sign({**CLAIMS, "roles": roles}))[0].roles == frozenset()


def test_a_token_has_a_length() -> None:
    token = ISSUER.token(exp=NOW + 60)
    assert issuer_of(token) == NAME
    assert issuer_of(ISSUER.token(iss=None)) == ""
    # A time of now has more digits at one moment than at another.
    long = ISSUER.token(exp=NOW + 60, filler="x" * 5000)
    longest = ISSUER.token(exp=NOW + 60, filler="x" * (5000 + (8192 - len(long)) * 3 // 4))
    assert 8189 <= len(longest) <= 8192
    assert issuer_of(longest) == NAME
    for length in (8193, 9000):
        with pytest.raises(Unauthenticated, match="longer than 8192"):
            issuer_of(longest.ljust(length, "x"))
    with pytest.raises(Unauthenticated, match="neither"):
        issuer_of("x" * 8192)


@pytest.mark.parametrize("broken", [{"kty": "EC"}, {"kty": "RSA", "n": "!"}, {"kty": "OKP"}])
def test_a_key_that_cannot_be_read_beside_others_is_told(broken: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="has a key that cannot be read"):
        key_set({"keys": [*ISSUER.jwks()["keys"], broken]})


@pytest.mark.parametrize(
    "extra", [{"kty": "oct", "k": "AA"}, {"kty": "RSA", "use": "enc"}, {"use": "sig"}, 5, "key"]
)
def test_keys_of_other_kinds_are_left_out(extra: object) -> None:
    jwks = {"keys": [extra, *ISSUER.jwks()["keys"], *Issuer("key-2").jwks()["keys"]]}
    assert set(key_set(jwks)) == {"key-1", "key-2"}


@pytest.mark.parametrize(
    "claims",
    [{"iss": "https://evil.org"}, {"tenant": None}, {"tenant": "a.b"}, {"tenant": ["acme"]}],
)
def test_wrong_claims_are_refused(claims: dict[str, Any]) -> None:
    token = ISSUER.token(**{"exp": NOW + 60, **claims})
    assert refused(token).metadata["problem"] == "TOKEN_INVALID"


def test_a_token_without_a_signature_is_refused() -> None:
    for algorithm in ("none", "None", "nOnE"):
        token = f"{part({'alg': algorithm, 'kid': 'key-1'})}.{part(CLAIMS)}."
        assert "algorithm" in refused(token).message
    assert "algorithm" in refused(jwt.encode(CLAIMS, "", "none", headers={"kid": "key-1"})).message


def test_a_public_key_used_as_a_secret_is_refused() -> None:
    head = f"{part({'alg': 'HS256', 'kid': 'key-1'})}.{part(CLAIMS)}"
    secret = json.dumps(ISSUER.jwks()["keys"][0]).encode()
    signature = hmac.digest(secret, head.encode(), "sha256")
    token = f"{head}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"
    assert "algorithm" in refused(token).message


def test_another_key_and_changed_claims_are_refused() -> None:
    assert "Signature" in refused(STRANGER.token(exp=NOW + 60)).message
    header, _, signature = ISSUER.token(exp=NOW + 60).split(".")
    claims = part({**CLAIMS, "tenant": "other"})
    assert "Signature" in refused(f"{header}.{claims}.{signature}").message


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


def test_keys_are_not_fetched_over_http() -> None:
    with pytest.raises(ValueError, match="https"):
        JwtSettings(issuer=NAME, audience=AUDIENCE, jwks="http://login.example.org/jwks")
