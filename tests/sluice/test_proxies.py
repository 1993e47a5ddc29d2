"""Machines with HTTP proxies: calls that stay on the machine use none."""

import asyncio
import urllib.request

import pytest

from sluice.client import AsyncClient, Client
from sluice.proxies import bypass_loopback
from sluice.tls import open_channel
from tests.support.scripted import ScriptedService, delta, finished, started

WHOLE = [started(), delta(0, "abc"), finished()]
BOUND_S = 60.0
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({}, None),
        ({"http_proxy": ""}, None),
        ({"http_proxy": NOWHERE}, "localhost,127.0.0.1,::1,[::1]"),
        ({"HTTPS_PROXY": NOWHERE, "no_proxy": ""}, "localhost,127.0.0.1,::1,[::1]"),
        (
            {"all_proxy": NOWHERE, "NO_PROXY": "10.0.0.0/8, .corp"},
            "10.0.0.0/8,.corp,localhost,127.0.0.1,::1,[::1]",
        ),
    ],
)
def test_loopback_is_added_where_a_proxy_is_set(given: dict[str, str], hosts: str | None) -> None:
    environment = dict(given)
    bypass_loopback(environment)
    bypass_loopback(environment)
    if hosts is None:
        assert environment == given
    else:
        assert environment["no_proxy"] == environment["NO_PROXY"] == hosts


def test_the_bypass_of_grpc_alone_is_extended() -> None:
    environment = {"grpc_proxy": NOWHERE, "no_grpc_proxy": "corp"}
    bypass_loopback(environment)
    assert environment["no_grpc_proxy"] == "corp,localhost,127.0.0.1,::1,[::1]"


def test_urllib_follows_the_bypass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    bypass_loopback()
    for host in ("localhost:80", "127.0.0.1:80", "127.0.0.1"):
        assert urllib.request.proxy_bypass(host)
    assert not urllib.request.proxy_bypass("example.org:80")


async def test_channels_on_this_machine_use_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    async with ScriptedService.serve([WHOLE, WHOLE]) as service:
        async with AsyncClient(service.address) as client:
            assert (await client.generate("x", timeout_s=BOUND_S).answer()).text == "abc"

        def blocking() -> str:
            with Client(service.address) as client:
                return client.generate("x", timeout_s=BOUND_S).answer().text

        assert await asyncio.to_thread(blocking) == "abc"
        async with open_channel(service.address, None, ()) as channel:
            await asyncio.wait_for(channel.channel_ready(), BOUND_S)


async def test_channels_to_other_machines_use_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.get_running_loop().create_future()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set_result(await reader.readline()) if not asked.done() else None
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        async with AsyncClient("gateway.invalid:50051") as client:
            answer = asyncio.ensure_future(client.generate("x", timeout_s=BOUND_S).answer())
            assert await asyncio.wait_for(asked, BOUND_S) == (
                b"CONNECT gateway.invalid:50051 HTTP/1.1\r\n"
            )
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
