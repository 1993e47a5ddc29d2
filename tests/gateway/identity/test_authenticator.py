"""Keys of issuers and of the bucket, read from where they are."""

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from gateway.identity import key_sources
from gateway.identity.authenticator import Authenticator, Identities
from gateway.identity.caller import Caller
from gateway.identity.credentials import KeyMissing, caller_of_key, caller_of_token, key_set
from gateway.identity.key_sources import IssuerKeys, KeyBucket
from sluice.errors import (
    PermissionDenied,
    SettingsError,
    SluiceError,
    TransportUnavailable,
    Unauthenticated,
)
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings import IdentitySettings, JwtSettings
from sluice.wire import jetstream
from sluice.wire.api_keys import new_key
from sluice.wire.bucket import Bucket
from tests.gateway.kit.issuer import AUDIENCE, NAME, Issuer, bearer, key_record, make_key

BOUND_S = 60.0
KEYS = key_set(Issuer().jwks())


class JwksServer(ThreadingHTTPServer):
    """Answers with `body`; counts. A status of 3xx leads to /elsewhere, which answers with `elsewhere`."""

    body = b"{}"
    elsewhere = b"{}"
    status = 200
    asked = 0
    asked_elsewhere = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/jwks"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, JwksServer)
        if self.path == "/elsewhere":
            server.asked_elsewhere += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(server.elsewhere)
            return
        server.asked += 1
        self.send_response(server.status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(server.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def jwks_server() -> Iterator[JwksServer]:
    with JwksServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


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


async def test_keys_that_an_issuer_has_changed_are_fetched(
    client: Client, jwks_server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = Issuer("old"), Issuer("new")
    jwks_server.body = json.dumps(old.jwks()).encode()
    authenticator = Authenticator(at(jwks_server.url))
    await authenticator.start(client)
    assert (await called(authenticator, old.token())).tenant == "acme"

    jwks_server.body = json.dumps(new.jwks()).encode()
    assert await problem(authenticator, new.token()) == "TOKEN_INVALID"  # fetched a moment ago
    assert jwks_server.asked == 1
    monkeypatch.setattr(key_sources, "AGAIN_S", 0.0)
    assert (await called(authenticator, new.token())).tenant == "acme"
    assert await problem(authenticator, old.token()) == "TOKEN_INVALID"


async def test_an_issuer_that_does_not_answer_leaves_its_last_keys(
    client: Client, jwks_server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_sources, "AGAIN_S", 0.0)
    issuer = Issuer()
    jwks_server.body = b"no JSON"
    authenticator = Authenticator(at(jwks_server.url))
    await authenticator.start(client)
    with pytest.raises(TransportUnavailable) as unavailable:
        await called(authenticator, issuer.token())
    assert unavailable.value.retry_after_s is not None

    jwks_server.body = json.dumps(issuer.jwks()).encode()
    first = next(iter(authenticator._identities.issuers.values()))
    await first.refresh()
    for status, body in ((500, b""), (404, b""), (200, b"{}"), (200, b"")):
        jwks_server.status, jwks_server.body = status, body
        await first.refresh()
        assert await problem(authenticator, Issuer("other").token()) == "TOKEN_INVALID"
        assert (await called(authenticator, issuer.token())).tenant == "acme"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_keys_behind_a_redirect_are_not_taken(
    client: Client, jwks_server: JwksServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(key_sources, "AGAIN_S", 0.0)
    issuer, thief = Issuer("key-1"), Issuer("thief")
    jwks_server.body = json.dumps(issuer.jwks()).encode()
    jwks_server.elsewhere = json.dumps(thief.jwks()).encode()
    authenticator = Authenticator(at(jwks_server.url))
    await authenticator.start(client)
    jwks_server.status = status
    assert await problem(authenticator, thief.token()) == "TOKEN_INVALID"
    assert jwks_server.asked == 2
    assert jwks_server.asked_elsewhere == 0
    assert (await called(authenticator, issuer.token())).tenant == "acme"


async def test_keys_have_a_size(
    client: Client, jwks_server: JwksServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_sources, "AGAIN_S", 0.0)
    old, new = Issuer("old"), Issuer("new")
    jwks_server.body = json.dumps(old.jwks()).encode().ljust(256 * 1024)
    authenticator = Authenticator(at(jwks_server.url))
    await authenticator.start(client)
    assert (await called(authenticator, old.token())).tenant == "acme"
    jwks_server.body = json.dumps(new.jwks()).encode().ljust(256 * 1024 + 1)
    assert await problem(authenticator, new.token()) == "TOKEN_INVALID"
    assert jwks_server.asked == 2
    assert (await called(authenticator, old.token())).tenant == "acme"

    file = tmp_path / "jwks.json"
    file.write_bytes(jwks_server.body)
    with pytest.raises(SettingsError, match="larger than 262144 bytes"):
        await Authenticator(at(str(file))).start(client)


async def test_other_settings_hold_for_credentials_that_were_accepted_before(
    client: Client, tmp_path: Path
) -> None:
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


async def test_keys_are_not_fetched_more_often_than_every_five_seconds(
    jwks_server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr("gateway.identity.key_sources.time.monotonic", lambda: clock)
    jwks_server.body = json.dumps(Issuer().jwks()).encode()
    changes = list[int]()
    keys = IssuerKeys(at(jwks_server.url).jwt[0], "identity.jwt.0", lambda: changes.append(1))
    with pytest.raises(TransportUnavailable) as unavailable:
        _ = keys.keys
    assert unavailable.value.retry_after_s == 5.0
    for now, asked in ((100.0, 1), (104.9, 1), (105.0, 2), (109.9, 2), (110.0, 3)):
        clock = now
        await keys.refresh()
        assert jwks_server.asked == asked
    assert len(changes) == 1, "the same keys"
    assert keys.digest == hashlib.sha256(jwks_server.body).hexdigest()
    # A failure counts as well.
    jwks_server.body = b"no JSON"
    for now in (115.0, 119.9):
        clock = now
        await keys.refresh()
    assert jwks_server.asked == 4
    assert set(keys.keys) == {"key-1"}
    jwks_server.body, clock = json.dumps(Issuer("key-2").jwks()).encode(), 120.0
    await keys.refresh()
    assert set(keys.keys) == {"key-2"}
    assert len(changes) == 2


async def test_one_fetch_is_for_all_who_wait(jwks_server: JwksServer) -> None:
    jwks_server.body = json.dumps(Issuer().jwks()).encode()
    keys = IssuerKeys(at(jwks_server.url).jwt[0], "identity.jwt.0", lambda: None)
    await asyncio.gather(*(keys.refresh() for _ in range(9)))
    assert jwks_server.asked == 1


async def test_keys_are_read_every_five_minutes_and_soon_while_there_are_none(
    jwks_server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = IssuerKeys(at(jwks_server.url).jwt[0], "identity.jwt.0", lambda: None)
    happened, pause = list[float | str](), asyncio.sleep

    async def sleep(delay_s: float) -> None:
        happened.append(delay_s)
        await pause(0)

    async def refresh() -> None:
        happened.append("read")
        if len(happened) == 4:
            keys._keys = KEYS
        if len(happened) == 8:
            raise asyncio.CancelledError

    monkeypatch.setattr(key_sources.asyncio, "sleep", sleep)
    keys.refresh = refresh  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await keys.run()
    assert happened == [5.0, "read", 5.0, "read", 300.0, "read", 300.0, "read"]


async def test_a_server_that_does_not_answer_is_given_up(
    jwks_server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()

    async def wait_for(awaitable: Any, timeout_s: float) -> Any:
        waits.append(timeout_s)
        awaitable.close()
        raise TimeoutError

    class Opener:
        def open(self, url: str, timeout: float) -> Any:
            waits.append(timeout)
            raise TimeoutError

    keys = IssuerKeys(at(jwks_server.url).jwt[0], "identity.jwt.0", lambda: None)
    monkeypatch.setattr(key_sources.asyncio, "wait_for", wait_for)
    await keys.start()
    monkeypatch.undo()
    monkeypatch.setattr(key_sources.urllib.request, "build_opener", lambda *_: Opener())
    await keys.start()
    assert waits == [5.0, 4.0]


async def test_what_cannot_be_used_says_what_happens_until_then(
    jwks_server: JwksServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_sources, "AGAIN_S", 0.0)
    keys = IssuerKeys(at(jwks_server.url).jwt[0], "identity.jwt.0", lambda: None)
    jwks_server.status = 503
    await keys.start()
    assert "status 503; tokens of this issuer are refused until it answers" in caplog.text
    jwks_server.status, jwks_server.body = 200, json.dumps(Issuer().jwks()).encode()
    await keys.refresh()
    jwks_server.body = b"["
    await keys.refresh()
    assert "is not JSON; its last keys stay in force" in caplog.text
    jwks_server.body = b"[" * 100_000
    await keys.refresh()
    assert set(keys.keys) == {"key-1"}


async def test_a_file_of_keys_that_cannot_be_used_stops_the_start(
    client: Client, tmp_path: Path
) -> None:
    for text in (None, "no JSON", "{}"):
        path = tmp_path / "jwks.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(SettingsError, match=r"identity\.jwt\.0\.jwks: .*jwks\.json cannot"):
            await Authenticator(at(str(path))).start(client)


async def test_a_revoked_key_is_refused_and_nats_away_changes_nothing(
    client: Client, tmp_path: Path
) -> None:
    bucket = Bucket(jetstream.API_KEYS)
    await bucket.start(client)
    authenticator = Authenticator(IdentitySettings(api_keys=True))
    await authenticator.start(client)
    running = asyncio.ensure_future(authenticator.run())
    key_id, text = await make_key(bucket, "acme")
    async with asyncio.timeout(BOUND_S):
        while not authenticator._identities.bucket or not authenticator._identities.bucket.records:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await called(authenticator, text)).key_id == key_id

    record = authenticator._identities.bucket.records[key_id]
    record.revoke_unix_ms = 1
    await bucket.write(key_id, record)
    async with asyncio.timeout(BOUND_S):
        while authenticator._identities.bucket.records[key_id] is record:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await problem(authenticator, text) == "KEY_REVOKED"
    await client.close()
    await asyncio.sleep(0)
    assert await problem(authenticator, text) == "KEY_REVOKED"
    assert not running.done()
    running.cancel()


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


async def test_certificates_and_the_key_of_the_mesh(client: Client) -> None:
    names = {"spiffe://example.org/team-a": {"tenant": "team-a", "roles": ["auditor"]}}
    settings = IdentitySettings(certificates=names, mesh_key="0123456789abcdef")
    authenticator = Authenticator(settings)
    found = await authenticator.caller_of({}, ["other", "spiffe://example.org/team-a"])
    assert (found.tenant, found.roles) == ("team-a", {"auditor"})
    with pytest.raises(Unauthenticated) as unknown:
        await authenticator.caller_of({}, ["spiffe://example.org/team-b"])
    assert unknown.value.metadata["problem"] == "CERTIFICATE_UNKNOWN"
    mesh = await called(authenticator, "0123456789abcdef", **{"sluice-tenant": "acme"})
    assert mesh.tenant == "acme"
    with pytest.raises(PermissionDenied, match="team-a"):
        await authenticator.caller_of({"sluice-tenant": "acme"}, list(names))


async def test_credentials_that_are_no_bearers_are_refused(client: Client) -> None:
    authenticator = Authenticator(IdentitySettings(api_keys=True))
    for text in ("Basic YTpi", "Bearer", "slc_x", "Bearerx y"):
        with pytest.raises(Unauthenticated, match="must be 'Bearer '") as refused:
            await authenticator.caller_of({"authorization": text})
        assert refused.value.metadata["problem"] == "CREDENTIALS_MISSING"
    for metadata in ({}, {"authorization": ""}):
        with pytest.raises(Unauthenticated, match="this mesh asks who calls") as refused:
            await authenticator.caller_of(metadata)
        assert refused.value.metadata["problem"] == "CREDENTIALS_MISSING"


async def test_names_of_certificates_count_where_some_are_listed() -> None:
    without = Authenticator(IdentitySettings(api_keys=True))
    assert not without.takes_certificates
    with pytest.raises(Unauthenticated) as refused:
        await without.caller_of({}, ["anybody"])
    assert refused.value.metadata["problem"] == "CREDENTIALS_MISSING"
    listed = Authenticator(IdentitySettings(certificates={"a": {"tenant": "acme"}}))
    assert listed.takes_certificates
    with pytest.raises(Unauthenticated) as refused:
        await listed.caller_of({}, [])
    assert refused.value.metadata["problem"] == "CREDENTIALS_MISSING"
    found = await listed.caller_of({"sluice-tenant": "acme"}, ["x", "a"])
    assert (found.tenant, found.roles) == ("acme", {"caller"})


async def test_without_a_key_of_the_mesh_nothing_is_it() -> None:
    authenticator = Authenticator(IdentitySettings(api_keys=True))
    assert authenticator.on
    for text in ("", "None", "0123456789abcdef"):
        with pytest.raises(Unauthenticated):
            await called(authenticator, text)
    assert not Authenticator(IdentitySettings()).on
    mesh = Authenticator(IdentitySettings(api_keys=True, mesh_key="0123456789abcdef"))
    found = await called(mesh, " 0123456789abcdef ")
    assert (found.tenant, found.roles >= {"mesh", "operator"}) == ("default", True)
    for text in ("0123456789abcdeg", "0123456789abcde", "0123456789abcdeff"):
        with pytest.raises(Unauthenticated):
            await called(mesh, text)


def with_keys(authenticator: Authenticator, *keys: tuple[str, ApiKeyRecord]) -> Authenticator:
    bucket = KeyBucket(1, lambda: None)
    bucket.records = dict(keys)
    authenticator.use(replace(authenticator._identities, bucket=bucket))
    return authenticator


async def test_a_key_that_was_accepted_ends_at_its_time() -> None:
    made, now = new_key(), 1.0
    authenticator = Authenticator(IdentitySettings(api_keys=True), unix_time=lambda: now)
    with_keys(authenticator, (made.id, key_record(made.text, "acme", expire_unix_ms=2000)))
    assert (await called(authenticator, made.text)).key_id == made.id
    now = 1.999
    assert await called(authenticator, made.text)
    now = 2.0
    assert await problem(authenticator, made.text) == "KEY_EXPIRED"


async def test_items_have_the_limits_of_the_key_of_their_job() -> None:
    made, other, now = new_key(), new_key(), 1.0
    settings = IdentitySettings(api_keys=True, mesh_key="0123456789abcdef")
    authenticator = Authenticator(settings, unix_time=lambda: now)
    record = key_record(made.text, "acme", expire_unix_ms=2000)
    record.requests_per_minute = 3
    with_keys(authenticator, (made.id, record), (other.id, key_record(other.text, "other")))

    async def item(key_id: str) -> Caller:
        metadata = {"sluice-tenant": "acme", "sluice-key-id": key_id}
        return await called(authenticator, "0123456789abcdef", **metadata)

    found = authenticator.of_item(await item(made.id))
    assert (found.tenant, found.key_id, found.key_limits.requests_per_minute) == (
        "acme",
        made.id,
        3,
    )
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


async def test_callers_name_no_key_of_a_job() -> None:
    made = new_key()
    authenticator = Authenticator(IdentitySettings(api_keys=True, mesh_key="0123456789abcdef"))
    with_keys(authenticator, (made.id, key_record(made.text, "acme")))
    found = await called(authenticator, made.text, **{"sluice-key-id": "another"})
    assert found.key_id == made.id
    open_ = Authenticator(IdentitySettings())
    assert not (await open_.caller_of({"sluice-key-id": "another"})).key_id


async def test_a_credential_that_was_accepted_costs_a_look_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, now = new_key(), 1.0
    looked = list[str]()

    def look(text: str, *rest: Any) -> tuple[Caller, float]:
        looked.append(text)
        return caller_of_key(text, *rest)

    monkeypatch.setattr("gateway.identity.authenticator.caller_of_key", look)
    authenticator = Authenticator(IdentitySettings(api_keys=True), unix_time=lambda: now)
    with_keys(authenticator, (made.id, key_record(made.text, "acme")))
    for later in (1.0, 5.0, 1e15):
        now = later
        assert (await called(authenticator, made.text)).tenant == "acme"
    assert looked == [made.text]
    now = 1.0
    with_keys(authenticator, (made.id, key_record(made.text, "acme", expire_unix_ms=2_000_000)))
    authenticator._known.clear()
    for later in (1.0, 1999.9):
        now = later
        assert await called(authenticator, made.text)
    assert looked == [made.text] * 2
    # Another tenant's name beside a remembered credential is no other call's.
    with pytest.raises(PermissionDenied):
        await called(authenticator, made.text, **{"sluice-tenant": "other"})
    assert (await called(authenticator, made.text, **{"sluice-tenant": "acme"})).tenant == "acme"


def test_so_many_credentials_are_remembered_and_the_oldest_go_first() -> None:
    authenticator = Authenticator(IdentitySettings(api_keys=True))
    for number in range(16_385):
        authenticator._remember(b"%d" % number, (Caller("acme"), 5.0))
    assert len(authenticator._known) == 16_384
    assert b"0" not in authenticator._known
    assert authenticator._known[b"1"] == (Caller("acme"), 5.0)


async def test_what_the_key_of_an_issuer_signed_is_not_that_of_another(
    client: Client, tmp_path: Path
) -> None:
    one = Issuer().written(tmp_path / "one.json")
    two = Issuer().written(tmp_path / "two.json").model_copy(update={"issuer": "https://two"})
    authenticator = Authenticator(IdentitySettings(jwt=(one, two)))
    await authenticator.start(client)
    assert await problem(authenticator, Issuer().token()) == "TOKEN_INVALID"
    assert await problem(authenticator, Issuer().token(iss="https://three")) == "TOKEN_INVALID"


async def test_gateways_compare_the_keys_that_are_in_files(
    client: Client, jwks_server: JwksServer, tmp_path: Path
) -> None:
    jwks_server.body = json.dumps(Issuer().jwks()).encode()
    file, url = Issuer().written(tmp_path / "jwks.json"), at(jwks_server.url).jwt[0]
    url = url.model_copy(update={"issuer": "https://two"})
    authenticator = Authenticator(IdentitySettings(jwt=(file, url)))
    await authenticator.start(client)
    digest = hashlib.sha256((tmp_path / "jwks.json").read_bytes()).hexdigest()
    assert authenticator._identities.digests == [digest]


async def test_issuers_and_keys_that_stay_are_not_read_anew_and_others_are(
    client: Client, jwks_server: JwksServer
) -> None:
    jwks_server.body = json.dumps(Issuer().jwks()).encode()
    settings = at(jwks_server.url).model_copy(update={"api_keys": True})
    authenticator = Authenticator(settings, replicas=1)
    await authenticator.start(client)
    before = authenticator._identities
    prepared = await authenticator.prepare(settings)
    assert prepared.issuers[NAME] is before.issuers[NAME]
    assert prepared.bucket is before.bucket is not None
    assert authenticator._identities is before, "not before it is used"
    stricter = settings.jwt[0].model_copy(update={"leeway_s": 1})
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
    assert authenticator._identities is prepared


async def test_before_it_has_started_keys_in_files_alone_are_read(tmp_path: Path) -> None:
    file = Issuer().written(tmp_path / "jwks.json")
    authenticator = Authenticator(IdentitySettings())
    prepared = await authenticator.prepare(IdentitySettings(jwt=(file,), api_keys=True))
    assert prepared.bucket is not None
    assert set(prepared.issuers[NAME].keys) == {"key-1"}


async def test_new_keys_end_what_was_remembered(client: Client) -> None:
    bucket = Bucket(jetstream.API_KEYS)
    await bucket.start(client)
    authenticator = Authenticator(IdentitySettings(api_keys=True))
    await authenticator.start(client)
    key_id, text = await make_key(bucket, "acme")
    assert authenticator._identities.bucket is not None
    await authenticator._identities.bucket.refresh()
    assert await called(authenticator, text)
    await authenticator._identities.bucket.refresh()
    assert authenticator._known, "nothing has changed"
    await bucket.write(key_id, ApiKeyRecord(tenant="acme", revoke_unix_ms=1))
    await authenticator._identities.bucket.refresh()
    assert not authenticator._known
    assert await problem(authenticator, text) == "KEY_INVALID"


class Watched(Identities):
    """Notes when it runs."""

    async def run(self) -> None:
        running.append(self)
        try:
            await asyncio.Event().wait()
        finally:
            running.remove(self)


running = list[Identities]()


async def test_the_keys_in_use_are_kept_up_to_date_and_those_before_are_not() -> None:
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


async def test_identities_run_all_that_has_keys() -> None:
    class Source:
        def __init__(self) -> None:
            self.runs = False

        async def run(self) -> None:
            self.runs = True

    one, two, bucket = (Source() for _ in range(3))
    sources: Any = {"one": one, "two": two}
    await Identities(IdentitySettings(), sources, cast(Any, bucket)).run()
    await Identities(IdentitySettings(), {}, None).run()
    assert one.runs
    assert two.runs
    assert bucket.runs


async def test_without_identities_the_metadata_names_the_tenant() -> None:
    authenticator = Authenticator(IdentitySettings())
    caller = await authenticator.caller_of({"sluice-tenant": "acme", "authorization": "Basic x"})
    assert (caller.tenant, caller.reads, caller.changes) == ("acme", None, None)


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
def test_whatever_is_sent_as_a_credential_gets_a_typed_error(authorization: str) -> None:
    settings = at("https://login.example.org/jwks")
    authenticator = Authenticator(settings.model_copy(update={"api_keys": True}))
    with pytest.raises(SluiceError):
        asyncio.run(authenticator.caller_of({"authorization": authorization}))


@given(_OBJECT, _OBJECT, _PART)
def test_whatever_an_issuer_is_said_to_have_signed_gets_a_typed_error(
    head: str, claims: str, signature: str
) -> None:
    settings = at("https://login.example.org/jwks").jwt[0]
    token = f"{head.rstrip('=')}.{claims.rstrip('=')}.{signature}"
    with pytest.raises((Unauthenticated, KeyMissing)):
        caller_of_token(token, settings, KEYS, 0.0)
