"""Keys of issuers, read from a URL or a file, and API keys, read from JetStream."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nats
import pytest

from gateway.identity.key_sources import IssuerKeys, KeyBucket
from sluice.errors import SettingsError, TransportUnavailable
from sluice.settings import JwtSettings
from sluice.wire import jetstream
from sluice.wire.bucket import Bucket
from tests.gateway.kit.issuer import AUDIENCE, NAME, Issuer, make_key

BOUND_S = 60.0


class JwksServer(ThreadingHTTPServer):
    """Answers with `body` and counts; a status of 3xx redirects to /elsewhere, which has `elsewhere`."""

    body = b"{}"
    elsewhere = b"{}"
    status = 200
    asked = 0
    asked_elsewhere = 0

    def settings(self) -> JwtSettings:
        url = f"http://127.0.0.1:{self.server_port}/jwks"
        return JwtSettings(issuer=NAME, audience=AUDIENCE, jwks=url)

    def serve(self, *issuers: Issuer) -> None:
        keys = [key for one in issuers for key in one.jwks()["keys"]]
        self.body = json.dumps({"keys": keys}).encode()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, JwksServer)
        if self.path == "/elsewhere":
            server.asked_elsewhere += 1
            self.send_response(200)
            body = server.elsewhere
        else:
            server.asked += 1
            self.send_response(server.status)
            self.send_header("Location", "/elsewhere")
            body = server.body
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[JwksServer]:
    with JwksServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        server.serve(Issuer())
        yield server
        server.shutdown()
        thread.join()


def keys_at(
    server: JwksServer, on_change: Callable[[], None] = lambda: None, **times: Any
) -> IssuerKeys:
    return IssuerKeys(server.settings(), "identity.jwt.0", on_change, **times)


async def test_changed_keys_replace_the_last_ones(server: JwksServer) -> None:
    changes = list[int]()
    keys = keys_at(server, partial(changes.append, 1), again_s=0.0)
    await keys.start()
    await keys.refresh()
    assert (set(keys.keys), len(changes)) == ({"key-1"}, 1)
    assert keys.digest == hashlib.sha256(server.body).hexdigest()
    server.serve(Issuer("key-2"))
    await keys.refresh()
    assert (set(keys.keys), len(changes)) == ({"key-2"}, 2)


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (500, b"", "status 500"),
        (404, b"", "status 404"),
        (200, b"", "is not JSON"),
        (200, b"[", "is not JSON"),
        (200, b"[" * 100_000, "is not JSON"),
        (200, b"{}", 'is not a JWKS: it has no list "keys"'),
        (200, b" " * (256 * 1024 + 1), "is larger than 262144 bytes"),
        *((status, b"", f"status {status}") for status in (301, 302, 303, 307, 308)),
    ],
)
async def test_bad_answers_leave_the_last_keys(
    server: JwksServer, caplog: pytest.LogCaptureFixture, status: int, body: bytes, problem: str
) -> None:
    good = server.body.ljust(256 * 1024)
    server.elsewhere = json.dumps(Issuer("thief").jwks()).encode()
    keys = keys_at(server, again_s=0.0)
    server.status, server.body = status, body
    await keys.start()
    assert f"{problem}; tokens of this issuer are refused until it answers" in caplog.text
    with pytest.raises(TransportUnavailable):
        _ = keys.keys
    server.status, server.body = 200, good
    await keys.refresh()
    server.status, server.body = status, body
    await keys.refresh()
    assert f"{problem}; its last keys stay in force" in caplog.text
    assert set(keys.keys) == {"key-1"}
    assert (server.asked, server.asked_elsewhere) == (3, 0)


async def test_keys_are_not_fetched_again_within_five_seconds(server: JwksServer) -> None:
    clock = 100.0
    keys = keys_at(server, clock=lambda: clock)
    with pytest.raises(TransportUnavailable) as unavailable:
        _ = keys.keys
    assert unavailable.value.retry_after_s == 5.0
    for clock, asked in ((100.0, 1), (104.9, 1), (105.0, 2), (109.9, 2), (110.0, 3)):  # noqa: B007
        await keys.refresh()
        assert server.asked == asked
    server.body = b"no JSON"
    for clock in (115.0, 119.9):  # noqa: B007, a failure counts as well
        await keys.refresh()
    assert server.asked == 4


async def test_one_fetch_is_for_all_who_wait(server: JwksServer) -> None:
    keys = keys_at(server)
    await asyncio.gather(*(keys.refresh() for _ in range(9)))
    assert server.asked == 1


async def test_keys_are_read_soon_while_there_are_none(server: JwksServer) -> None:
    server.status = 500
    keys = keys_at(server, refresh_s=3600.0, again_s=0.0)
    running = asyncio.ensure_future(keys.run())
    async with asyncio.timeout(BOUND_S):
        while server.asked < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.status = 200
        while server.asked < 3 or keys.digest != hashlib.sha256(server.body).hexdigest():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    asked = server.asked
    await asyncio.sleep(0.1)
    assert server.asked == asked, "now every hour"
    running.cancel()


async def test_a_server_that_does_not_answer_is_given_up(
    server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = list[float]()

    class Opener:
        def open(self, url: str, timeout: float) -> Any:
            timeouts.append(timeout)
            raise TimeoutError

    monkeypatch.setattr("urllib.request.build_opener", lambda *_: Opener())
    await keys_at(server).start()
    assert timeouts == [4.0]


@pytest.mark.parametrize(
    "text", [None, "no JSON", "{}", " " * (256 * 1024 + 1)], ids=["none", "text", "empty", "large"]
)
async def test_a_bad_file_of_keys_stops_the_start(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "jwks.json"
    if text is not None:
        path.write_text(text)
    settings = JwtSettings(issuer=NAME, audience=AUDIENCE, jwks=str(path))
    with pytest.raises(SettingsError, match=r"identity\.jwt\.0\.jwks: .*jwks\.json cannot"):
        await IssuerKeys(settings, "identity.jwt.0", lambda: None).start()


async def test_api_keys_are_read_when_they_have_changed(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    changes = list[int]()
    bucket, writer = KeyBucket(1, lambda: changes.append(1)), Bucket(jetstream.API_KEYS)
    assert bucket.records == {}
    await writer.start(client)
    await bucket.start(client)
    assert (bucket.records, len(changes)) == ({}, 1)
    key_id, _ = await make_key(writer, "acme")
    await bucket.refresh()
    await bucket.refresh()
    assert (set(bucket.records), len(changes)) == ({key_id}, 2)
    await client.close()


class Scripted(KeyBucket):
    """Reaches NATS as `script` says, then ends."""

    script = [False, False, True, False]  # noqa: RUF012

    async def refresh(self) -> None:
        if not self.script:
            raise asyncio.CancelledError
        if not self.script.pop(0):
            raise TransportUnavailable("away")


async def test_api_keys_are_polled_while_nats_is_away(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(asyncio.CancelledError):
        await Scripted(1, lambda: None, poll_s=0.0).run()
    assert caplog.text.count("reading API keys failed, the last ones stay in force") == 2
