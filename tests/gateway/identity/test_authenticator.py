"""Keys of issuers and of the bucket, read from where they are."""

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from gateway.identity import jwks
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import Caller
from gateway.identity.tokens import KeyMissing, caller_of_token, key_set
from sluice.errors import (
    PermissionDenied,
    SettingsError,
    SluiceError,
    TransportUnavailable,
    Unauthenticated,
)
from sluice.settings import IdentitySettings, JwtSettings
from sluice.wire import jetstream
from sluice.wire.bucket import Bucket
from tests.gateway.kit.issuer import AUDIENCE, NAME, Issuer, bearer, make_key

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
        thread = threading.Thread(target=server.serve_forever)
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
    monkeypatch.setattr(jwks, "AGAIN_S", 0.0)
    assert (await called(authenticator, new.token())).tenant == "acme"
    assert await problem(authenticator, old.token()) == "TOKEN_INVALID"


async def test_an_issuer_that_does_not_answer_leaves_its_last_keys(
    client: Client, jwks_server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "AGAIN_S", 0.0)
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
    monkeypatch.setattr(jwks, "AGAIN_S", 0.0)
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
    monkeypatch.setattr(jwks, "AGAIN_S", 0.0)
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
