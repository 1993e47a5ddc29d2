"""Keys of issuers and of the bucket, read from where they are."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from gateway.identity.authenticator import Authenticator, Identities
from gateway.identity.caller import ANY, Caller
from gateway.identity.credentials import KeyMissing, caller_of_token, key_set
from gateway.identity.key_sources import KeyBucket
from sluice.errors import PermissionDenied, SettingsError, SluiceError, Unauthenticated
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings import IdentitySettings, JwtSettings
from sluice.wire import jetstream
from sluice.wire.api_keys import new_key
from sluice.wire.bucket import Bucket
from tests.gateway.kit.issuer import AUDIENCE, NAME, Issuer, bearer, key_record, make_key

BOUND_S = 60.0
KEYS = key_set(Issuer().jwks())


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Client]:
    connected = await nats.connect(nats_url)
    yield connected
    await connected.close()


def at(url: str) -> IdentitySettings:
    return IdentitySettings(jwt=(JwtSettings(issuer=NAME, audience=AUDIENCE, jwks=url),))


async def called(authenticator: Authenticator, credential: str, **metadata: str) -> Caller:
    return await authenticator.caller_of({**dict(bearer(credential)), **metadata})


async def problem(authenticator: Authenticator, credential: str) -> str:
    with pytest.raises(Unauthenticated) as refused:
        await called(authenticator, credential)
    return refused.value.metadata["problem"]


async def test_keys_that_an_issuer_has_changed_are_fetched(client: Client, tmp_path: Path) -> None:
    old, new = Issuer("old"), Issuer("new")
    settings = IdentitySettings(jwt=(old.written(tmp_path / "jwks.json"),))
    for again_s, problems in ((60.0, ["TOKEN_INVALID"]), (0.0, [])):
        old.written(tmp_path / "jwks.json")
        authenticator = Authenticator(settings, again_s=again_s)
        await authenticator.start(client)
        assert (await called(authenticator, old.token())).tenant == "acme"
        new.written(tmp_path / "jwks.json")
        if problems:  # read a moment ago
            assert await problem(authenticator, new.token()) == "TOKEN_INVALID"
            continue
        assert (await called(authenticator, new.token())).tenant == "acme"
        assert await problem(authenticator, old.token()) == "TOKEN_INVALID"


async def test_other_settings_hold_for_cached_credentials(client: Client, tmp_path: Path) -> None:
    issuer, other = Issuer(), Issuer("other")
    trusted = issuer.written(tmp_path / "jwks.json")
    authenticator = Authenticator(IdentitySettings(jwt=(trusted,)))
    await authenticator.start(client)
    token = issuer.token()
    assert (await called(authenticator, token)).tenant == "acme"

    # The issuer asks for another audience, then it has other keys, then it is gone.
    for changed in (
        (trusted.model_copy(update={"audience": "another"}),),
        (other.written(tmp_path / "other.json"),),
        (),
    ):
        authenticator.use(await authenticator.prepare(IdentitySettings(jwt=(trusted,))))
        assert (await called(authenticator, token)).tenant == "acme"
        authenticator.use(await authenticator.prepare(IdentitySettings(jwt=changed)))
        assert await problem(authenticator, token) == "TOKEN_INVALID"


async def test_a_revoked_key_is_refused_even_if_it_is_cached(client: Client) -> None:
    bucket = Bucket(jetstream.API_KEYS)
    await bucket.start(client)
    authenticator = Authenticator(IdentitySettings(api_keys=True))
    await authenticator.start(client)
    key_id, text = await make_key(bucket, "acme")
    await authenticator.refresh_keys()
    assert (await called(authenticator, text)).key_id == key_id
    await bucket.write(key_id, key_record(text, "acme", revoke_unix_ms=1))
    assert await called(authenticator, text), "not read yet"
    await authenticator.refresh_keys()
    assert await problem(authenticator, text) == "KEY_REVOKED"
    await client.close()
    assert await problem(authenticator, text) == "KEY_REVOKED"


async def test_a_token_that_was_accepted_ends_all_the_same(client: Client, tmp_path: Path) -> None:
    issuer, now = Issuer(), 1000.0
    settings = IdentitySettings(jwt=(issuer.written(tmp_path / "jwks.json"),))
    authenticator = Authenticator(settings, unix_time=lambda: now)
    await authenticator.start(client)
    token = issuer.token(exp=1010.0)
    assert await called(authenticator, token)
    assert await called(authenticator, token)
    now = 1041.0
    assert await problem(authenticator, token) == "TOKEN_EXPIRED"


MESH_KEY = "0123456789abcdef"
TEAM = "spiffe://example.org/team-a"
LISTED = {"certificates": {TEAM: {"tenant": "team-a", "roles": ["auditor"]}}, "mesh_key": MESH_KEY}
KEYED = {"api_keys": True, "mesh_key": MESH_KEY}


@pytest.mark.parametrize(
    ("settings", "metadata", "names", "problem"),
    [
        *(
            (KEYED, {"authorization": text}, (), "CREDENTIALS_MISSING")
            for text in ("Basic YTpi", "", "slc_x", "Bearer", "Bearerx y")
        ),
        (KEYED, {}, (), "CREDENTIALS_MISSING"),
        (KEYED, {}, ("anybody",), "CREDENTIALS_MISSING"),
        (LISTED, {}, (), "CREDENTIALS_MISSING"),
        (LISTED, {}, ("spiffe://example.org/team-b",), "CERTIFICATE_UNKNOWN"),
        *(
            (KEYED, dict(bearer(text)), (), "TOKEN_INVALID")
            for text in (MESH_KEY + "f", MESH_KEY[:-1])
        ),
        ({"api_keys": True}, dict(bearer(MESH_KEY)), (), "TOKEN_INVALID"),
        ({"api_keys": True}, dict(bearer("None")), (), "TOKEN_INVALID"),
    ],
)
async def test_what_names_nobody_is_refused(
    settings: dict[str, Any], metadata: dict[str, str], names: tuple[str, ...], problem: str
) -> None:
    authenticator = Authenticator(IdentitySettings(**settings))
    assert authenticator.on
    with pytest.raises(Unauthenticated) as refused:
        await authenticator.caller_of(metadata, names)
    assert refused.value.metadata["problem"] == problem


@pytest.mark.parametrize(
    ("metadata", "names", "tenant", "roles"),
    [
        ({}, ("other", TEAM), "team-a", {"auditor"}),
        ({"sluice-tenant": "team-a"}, (TEAM,), "team-a", {"auditor"}),
        ({**dict(bearer(f" {MESH_KEY} "))}, (), "default", ANY),
        ({**dict(bearer(MESH_KEY)), "sluice-tenant": "acme"}, (), "acme", ANY),
    ],
)
async def test_certificates_and_the_key_of_the_mesh_name_callers(
    metadata: dict[str, str], names: tuple[str, ...], tenant: str, roles: Collection[str]
) -> None:
    authenticator = Authenticator(IdentitySettings(**LISTED))
    assert authenticator.takes_certificates
    found = await authenticator.caller_of(metadata, names)
    assert (found.tenant, found.roles) == (tenant, roles)
    with pytest.raises(PermissionDenied, match="team-a"):
        await authenticator.caller_of({"sluice-tenant": "acme"}, (TEAM,))


def with_keys(authenticator: Authenticator, records: Mapping[str, ApiKeyRecord]) -> None:
    bucket = KeyBucket(1, lambda: None)
    bucket.records = records
    authenticator.use(replace(authenticator.identities, bucket=bucket))


async def test_items_have_the_limits_of_the_key_of_their_job() -> None:
    made, other, now = new_key(), new_key(), 1.0
    settings = IdentitySettings(api_keys=True, mesh_key="0123456789abcdef")
    authenticator = Authenticator(settings, unix_time=lambda: now)
    record = key_record(made.text, "acme", expire_unix_ms=2000)
    record.requests_per_minute = 3
    with_keys(authenticator, {made.id: record, other.id: key_record(other.text, "other")})

    async def item(key_id: str) -> Caller:
        metadata = {"sluice-tenant": "acme", "sluice-key-id": key_id}
        return await called(authenticator, "0123456789abcdef", **metadata)

    found = authenticator.of_item(await item(made.id))
    assert (found.tenant, found.key_id) == ("acme", made.id)
    assert found.key_limits.requests_per_minute == 3
    assert authenticator.of_item(Caller("acme")) == Caller("acme")
    for key_id in (other.id, "none"):
        with pytest.raises(Unauthenticated, match=f"there is no API key {key_id} any more"):
            authenticator.of_item(await item(key_id))
    now = 2.0
    with pytest.raises(Unauthenticated, match="has expired"):
        authenticator.of_item(await item(made.id))
    now, record.revoke_unix_ms = 1.0, 1
    with pytest.raises(Unauthenticated, match="was revoked"):
        authenticator.of_item(await item(made.id))


class CountedRecords(dict[str, ApiKeyRecord]):
    """Counts how often a key is looked up."""

    count = 0

    def get(self, *arguments: Any) -> Any:
        self.count += 1
        return super().get(*arguments)


async def test_accepted_credentials_are_cached_until_they_expire() -> None:
    made, now = new_key(), 1.0
    authenticator = Authenticator(IdentitySettings(api_keys=True), unix_time=lambda: now)
    records = CountedRecords({made.id: key_record(made.text, "acme", expire_unix_ms=2_000_000)})
    with_keys(authenticator, records)
    for now in (1.0, 5.0, 1999.9):  # noqa: B007
        assert (await called(authenticator, made.text)).tenant == "acme"
    # A cached credential does not let a caller name another tenant, or the key of a job.
    found = await called(authenticator, made.text, **{"sluice-key-id": "another"})
    assert found.key_id == made.id
    with pytest.raises(PermissionDenied):
        await called(authenticator, made.text, **{"sluice-tenant": "other"})
    assert (await called(authenticator, made.text, **{"sluice-tenant": "acme"})).tenant == "acme"
    assert records.count == 1
    now = 2000.0
    assert await problem(authenticator, made.text) == "KEY_EXPIRED"


async def test_the_oldest_credential_is_evicted() -> None:
    keys = [new_key() for _ in range(3)]
    authenticator = Authenticator(IdentitySettings(api_keys=True), cached_max=2)
    records = CountedRecords({made.id: key_record(made.text, "acme") for made in keys})
    with_keys(authenticator, records)
    for place, lookups in ((0, 1), (1, 2), (0, 2), (2, 3), (1, 3), (0, 4)):
        await called(authenticator, keys[place].text)
        assert records.count == lookups


async def test_what_the_key_of_an_issuer_signed_is_not_that_of_another(
    client: Client, tmp_path: Path
) -> None:
    one = Issuer().written(tmp_path / "one.json")
    two = Issuer().written(tmp_path / "two.json").model_copy(update={"issuer": "https://two"})
    authenticator = Authenticator(IdentitySettings(jwt=(one, two)))
    await authenticator.start(client)
    assert await problem(authenticator, Issuer().token()) == "TOKEN_INVALID"
    assert await problem(authenticator, Issuer().token(iss="https://three")) == "TOKEN_INVALID"


async def test_unchanged_issuers_and_keys_are_not_read_again(
    client: Client, tmp_path: Path
) -> None:
    settings = IdentitySettings(jwt=(Issuer().written(tmp_path / "jwks.json"),), api_keys=True)
    authenticator = Authenticator(settings, replicas=1)
    await authenticator.start(client)
    before = authenticator.identities
    prepared = await authenticator.prepare(settings)
    assert prepared.issuers[NAME] is before.issuers[NAME]
    digest = hashlib.sha256((tmp_path / "jwks.json").read_bytes()).hexdigest()
    assert prepared.digests == [digest]
    assert prepared.bucket is before.bucket is not None
    assert authenticator.identities is before, "not before it is used"
    stricter = settings.jwt[0].model_copy(update={"tenant_claim": "team"})
    changed = settings.model_copy(update={"jwt": (stricter,), "api_keys": False})
    prepared = await authenticator.prepare(changed)
    assert prepared.issuers[NAME] is not before.issuers[NAME]
    assert prepared.bucket is None
    authenticator.use(prepared)
    again = await authenticator.prepare(settings)
    assert again.bucket is not None
    wrong = JwtSettings(issuer="https://two", audience=AUDIENCE, jwks="/nowhere/jwks.json")
    with pytest.raises(SettingsError, match=r"identity\.jwt\.1\.jwks"):
        await authenticator.prepare(settings.model_copy(update={"jwt": (*settings.jwt, wrong)}))
    assert authenticator.identities is prepared


class Watched(Identities):
    """Notes when it runs."""

    async def run(self) -> None:
        running.append(self)
        try:
            await asyncio.Event().wait()
        finally:
            running.remove(self)


running = list[Identities]()


async def test_only_the_keys_in_use_are_kept_up_to_date() -> None:
    authenticator = Authenticator(IdentitySettings(api_keys=True))
    first, second, third = (Watched(IdentitySettings(), {}, None) for _ in range(3))
    authenticator.use(first)
    task = asyncio.ensure_future(authenticator.run())
    for identities in (first, second, third):
        authenticator.use(identities)
        async with asyncio.timeout(BOUND_S):
            while [*map(id, running)] != [id(identities)]:  # noqa: ASYNC110
                await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not running


async def test_without_identities_the_metadata_names_the_tenant() -> None:
    authenticator = Authenticator(IdentitySettings())
    caller = await authenticator.caller_of({"sluice-tenant": "acme", "authorization": "Basic x"})
    assert (caller.tenant, caller.readable_tenant, caller.writable_tenant) == ("acme", None, None)


_WORDS = st.one_of(
    st.text(max_size=300), st.binary(max_size=300).map(lambda b: b.decode("latin-1"))
)
_PART = st.binary(max_size=120).map(lambda b: base64.urlsafe_b64encode(b).decode().rstrip("="))
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["alg", "kid", "iss", "aud", "exp", "nbf", "tenant", "roles", "crit"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)
_OBJECT = _JSON.map(lambda one: base64.urlsafe_b64encode(json.dumps(one).encode()).decode())


@given(
    st.one_of(
        _WORDS,
        st.tuples(st.sampled_from(["Bearer ", "bearer slc_", "Basic "]), _WORDS).map("".join),
        st.tuples(_PART | _OBJECT, _PART | _OBJECT, _PART).map(lambda p: "Bearer " + ".".join(p)),
    )
)
def test_any_credential_gets_a_typed_error(authorization: str) -> None:
    settings = at("https://login.example.org/jwks")
    authenticator = Authenticator(settings.model_copy(update={"api_keys": True}))
    with pytest.raises(SluiceError):
        asyncio.run(authenticator.caller_of({"authorization": authorization}))


@given(_OBJECT, _OBJECT, _PART)
def test_any_signed_text_gets_a_typed_error(head: str, claims: str, signature: str) -> None:
    settings = at("https://login.example.org/jwks").jwt[0]
    token = f"{head.rstrip('=')}.{claims.rstrip('=')}.{signature}"
    with pytest.raises((Unauthenticated, KeyMissing)):
        caller_of_token(token, settings, KEYS, 0.0)
