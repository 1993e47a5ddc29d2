"""A message with headers is as large for nats-server as `header_bytes` says."""

import asyncio

import nats
import pytest

from sluice.wire.codec import header_bytes

HEADERS = {"Nats-Msg-Id": "req-1", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
BOUND_S = 60.0


@pytest.mark.parametrize(("over", "closed"), [(0, False), (1, True)])
async def test_one_byte_more_costs_the_connection(nats_url: str, over: int, closed: bool) -> None:
    lost = asyncio.Event()

    async def on_loss() -> None:
        lost.set()

    client = await nats.connect(nats_url, disconnected_cb=on_loss, error_cb=_ignore)
    payload = b"x" * (client.max_payload - header_bytes(HEADERS) + over)
    await client.publish("subject", payload, headers=HEADERS)
    if closed:
        await asyncio.wait_for(lost.wait(), BOUND_S)
    else:
        await client.flush(BOUND_S)
    assert lost.is_set() == closed
    await client.close()


async def _ignore(error: Exception) -> None:
    pass
