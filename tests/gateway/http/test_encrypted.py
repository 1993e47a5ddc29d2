"""The HTTP port with certificates."""

import asyncio
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gateway.http.call import CERTIFICATE_NAMES
from gateway.http.server import HttpServer
from sluice.tls import server_context
from supervisor.certificates import Authority


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    words = [scope["scheme"], *scope[CERTIFICATE_NAMES]]
    await send({"type": "http.response.body", "body": " ".join(words).encode()})


async def test_http_is_encrypted_and_asks_for_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.ensure(["gateway", "caller"])
    context = server_context(authority.of("gateway"), [authority.ca], "http/1.1")
    server = HttpServer("127.0.0.1:0", app, context)
    server.bind()
    await server.start()
    trusting = ssl.create_default_context(cafile=authority.ca)

    def get(scheme: str) -> bytes:
        url = f"{scheme}://{server.address}/"
        with urllib.request.urlopen(url, timeout=60, context=trusting) as answer:
            return bytes(answer.read())

    try:
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(get, "http")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(get, "https")
        folder = authority.of("caller")
        trusting.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        scheme, *names = (await asyncio.to_thread(get, "https")).decode().split()
        assert scheme == "https"
        assert "spiffe://sluice/caller" in names
    finally:
        await server.close()
