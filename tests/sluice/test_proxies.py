"""Machines with HTTP proxies: calls that stay on the machine use none."""

import asyncio

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
