"""API keys without I/O."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.identity.keys import caller_of_key
from sluice.errors import Unauthenticated
from sluice.wire.api_keys import digest_of, id_of, new_key
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
    caller = caller_of_key(KEY.text, records, 0.0)
    assert (caller.tenant, caller.key_id) == ("acme", KEY.id)
    assert caller.roles == {"caller", "auditor"}


def test_what_is_no_key_of_the_mesh_is_refused_with_its_problem() -> None:
    assert problem(OTHER.text) == "KEY_INVALID"
    assert problem(KEY.text[:-1]) == "KEY_INVALID"
    assert problem(KEY.text, revoke_unix_ms=1) == "KEY_REVOKED"
    assert problem(KEY.text, now=2.0, expire_unix_ms=2000) == "KEY_EXPIRED"


def test_whether_a_key_is_revoked_is_told_to_its_owner_alone() -> None:
    forged = f"slc_{KEY.id}_{OTHER.text.rpartition('_')[2]}"
    assert id_of(forged) is None  # the checksum covers the id
    records = {KEY.id: key_record(OTHER.text, "acme", revoke_unix_ms=1)}
    with pytest.raises(Unauthenticated) as refused:
        caller_of_key(KEY.text, records, 0.0)
    assert refused.value.metadata["problem"] == "KEY_INVALID"


@given(st.integers(0, len(KEY.text) - 1), st.sampled_from(string.ascii_lowercase + "234567_"))
def test_one_wrong_character_is_found_before_any_key_is_looked_up(at: int, character: str) -> None:
    wrong = KEY.text[:at] + character + KEY.text[at + 1 :]
    assert (id_of(wrong) == KEY.id) is (wrong == KEY.text)


def test_keys_differ_and_only_their_hash_is_kept() -> None:
    assert KEY != OTHER
    assert KEY.text.encode() not in key_record(KEY.text, "acme").SerializeToString()
    assert len(digest_of(KEY.text)) == 32
