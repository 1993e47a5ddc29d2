"""API keys without I/O."""

import base64
import hmac
import secrets
import string
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.identity import credentials
from gateway.identity.credentials import caller_of_key
from sluice.errors import Unauthenticated
from sluice.settings.limits import RateLimits
from sluice.wire.api_keys import PREFIX, NewKey, _checksum, digest_of, id_of, new_key
from tests.gateway.kit.issuer import key_record

KEY = new_key()
OTHER = new_key()


def problem(text: str, now: float = 0.0, **fields: int) -> str:
    records = {KEY.id: key_record(KEY.text, "acme", **fields)}
    with pytest.raises(Unauthenticated) as refused:
        caller_of_key(text, records, now)
    assert OTHER.text not in refused.value.message
    return refused.value.metadata["problem"]


def test_a_key_makes_the_calls_of_its_tenant_with_its_roles() -> None:
    records = {KEY.id: key_record(KEY.text, "acme", "caller", "auditor")}
    caller, _ = caller_of_key(KEY.text, records, 0.0)
    assert (caller.tenant, caller.key_id) == ("acme", KEY.id)
    assert caller.roles == {"caller", "auditor"}


@pytest.mark.parametrize(
    ("text", "message"),
    [(KEY.text[:-1], "is incomplete"), (OTHER.text, "there is no API key")],
    ids=["incomplete", "unknown"],
)
def test_an_incomplete_or_unknown_key_is_invalid(text: str, message: str) -> None:
    with pytest.raises(Unauthenticated, match=message) as refused:
        caller_of_key(text, {KEY.id: key_record(KEY.text, "acme")}, 0.0)
    assert refused.value.metadata["problem"] == "KEY_INVALID"


def test_a_key_ends_when_it_is_revoked_or_expires() -> None:
    assert problem(KEY.text, revoke_unix_ms=1) == "KEY_REVOKED"
    records = {KEY.id: key_record(KEY.text, "acme", expire_unix_ms=2000)}
    assert caller_of_key(KEY.text, records, 1.999)
    for now in (2.0, 2.001):
        assert problem(KEY.text, now, expire_unix_ms=2000) == "KEY_EXPIRED"
    assert caller_of_key(KEY.text, {KEY.id: key_record(KEY.text, "acme")}, 1e12)


def test_a_key_has_limits_of_its_own_or_none() -> None:
    for fields in ({}, {"requests_per_minute": 7}, {"tokens_per_minute": 8}):
        records = {KEY.id: key_record(KEY.text, "acme", **fields)}
        assert caller_of_key(KEY.text, records, 0.0)[0].key_limits == RateLimits(**fields)


def test_revocation_is_told_to_the_owner_alone() -> None:
    forged = f"slc_{KEY.id}_{OTHER.text.rpartition('_')[2]}"
    assert id_of(forged) is None  # the checksum covers the id
    records = {KEY.id: key_record(OTHER.text, "acme", revoke_unix_ms=1)}
    with pytest.raises(Unauthenticated) as refused:
        caller_of_key(KEY.text, records, 0.0)
    assert refused.value.metadata["problem"] == "KEY_INVALID"


@given(st.integers(0, len(KEY.text) - 1), st.sampled_from(string.ascii_lowercase + "234567_"))
def test_the_checksum_finds_one_wrong_character(at: int, character: str) -> None:
    wrong = KEY.text[:at] + character + KEY.text[at + 1 :]
    assert (id_of(wrong) == KEY.id) is (wrong == KEY.text)


def test_only_hashes_of_secrets_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(credentials, "compare_digest", compare)
    near = key_like(25)
    assert near.startswith(KEY.text[:56])
    for text in (KEY.text, near):
        records = {KEY.id: key_record(KEY.text, "acme")}
        with suppress(Unauthenticated):
            caller_of_key(text, records, 0.0)
    assert compared == [(digest_of(KEY.text), digest_of(text)) for text in (KEY.text, near)]


def key_like(right: int, key: NewKey = KEY) -> str:
    """A whole key with the id of `KEY`, of whose secret the first ``right`` of 31 bytes are those of ``key``."""
    known = base64.b32decode(key.text[-56:].upper())
    secret = known[:right] + secrets.token_bytes(31 - right)
    encoded = base64.b32encode(secret + _checksum(KEY.id, secret)).decode().lower()
    return f"{PREFIX}{KEY.id}_{encoded}"
