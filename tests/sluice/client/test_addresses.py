"""Several gateways behind one client: by a list of addresses, or by a name."""

import asyncio

import pytest

from sluice.client import AsyncClient, Delta
from sluice.client.channel import target_of
from sluice.errors import InvalidRequest
from sluice.startup import free_port
from tests.support.proxy import Proxy
from tests.support.scripted import Hold, ScriptedService, delta, finished, started

BOUND_S = 60.0
WHOLE = [started(), delta(0, "abc"), finished()]


def test_one_address_is_left_to_grpc() -> None:
    assert target_of("gateway:50051") == "gateway:50051"
    assert target_of("dns:///gateway:50051") == "dns:///gateway:50051"


def test_several_addresses_are_numbers() -> None:
    assert target_of("127.0.0.1:1, 127.0.0.2:2") == "ipv4:127.0.0.1:1,127.0.0.2:2"
    assert target_of("[::1]:1,[::1]:2") == "ipv6:[::1]:1,[::1]:2"
    assert "127.0.0.1:1" in target_of("localhost:1,127.0.0.1:2")
    assert target_of("nowhere.invalid:1,127.0.0.1:2") == "ipv4:127.0.0.1:2"


@pytest.mark.parametrize("address", ["127.0.0.1:1,127.0.0.1", "a.invalid:1,b.invalid:2"])
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(InvalidRequest, match="address"):
        target_of(address)


async def test_calls_are_shared_by_the_gateways() -> None:
    async with ScriptedService.serve([WHOLE]) as one, ScriptedService.serve([WHOLE]) as two:
        address = f"{one.address},{two.address}"
        async with asyncio.timeout(BOUND_S), AsyncClient(address) as client:
            while not (one.requests and two.requests):
                assert (await client.generate("x").answer()).text == "abc"


async def test_another_gateway_goes_on_where_one_was_lost() -> None:
    begins, rest = [started(), delta(0, "ab"), Hold()], [started(), delta(2, "c"), finished()]
    async with (
        ScriptedService.serve([begins, rest]) as one,
        ScriptedService.serve([begins, rest]) as two,
        Proxy(one.address) as to_one,
        Proxy(two.address) as to_two,
        AsyncClient(f"{to_one.address},{to_two.address}") as client,
        client.generate("x", timeout_s=BOUND_S) as stream,
    ):
        text = ""
        async for event in stream:
            text += event.text if isinstance(event, Delta) else ""
            if text == "ab":
                lost, other = (to_one, two) if one.requests else (to_two, one)
                other.scripts = [rest]
                lost.turn(f"127.0.0.1:{free_port()}")
                text += "|"
    assert text == "ab|c"
    assert list(other.requests[-1].resume.token_ids) == [100, 101]
    assert other.requests[-1].idempotency_key_generated
