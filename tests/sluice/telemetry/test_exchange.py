"""Metrics over NATS: what another process answers is bounded, and broken answers are passed over."""

from typing import Final

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from sluice.telemetry import exchange
from sluice.telemetry.exchange import MetricsExchange
from sluice.telemetry.instruments import Instruments
from sluice.v1.admin_pb2 import ProcessMetrics
from sluice.wire import subjects

TRIES: Final = 5
"""Queries at most: one in about thirty does not reach a connection that has just subscribed and flushed."""


async def read(nats_url: str, *answers: bytes, count: int) -> list[ProcessMetrics]:
    """Return what a process reads when another one gives `answers`, beside its own; `count` of them or more."""
    client, other = await nats.connect(nats_url), await nats.connect(nats_url)
    try:
        await _answer_with(other, answers)
        metrics = MetricsExchange("gateway", "g1", Instruments())
        await metrics.start(client)
        for _ in range(TRIES):
            found = await metrics.read_all([])
            if len(found) >= count:
                break
        return found
    finally:
        await client.close()
        await other.close()


async def _answer_with(other: Client, answers: tuple[bytes, ...]) -> None:
    async def answer(message: Msg) -> None:
        for payload in answers:
            await other.publish(message.reply, payload)

    await other.subscribe(subjects.METRICS, cb=answer)
    await other.flush()


async def test_answers_are_bounded_by_their_bytes(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "ANSWERS_BYTES", 100_000)
    large = ProcessMetrics(service="batcher", instance="x" * 60_000).SerializeToString()
    found = await read(nats_url, large, large, large, count=1)
    assert sum(len(one.instance) for one in found) <= 100_000


async def test_answers_are_bounded_by_their_number(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "ANSWERS_MAX", 3)
    assert len(await read(nats_url, *[b""] * 10, count=3)) == 3


async def test_broken_answers_are_passed_over(nats_url: str) -> None:
    found = await read(nats_url, b"\xff", b"\x0a\x01b", count=2)
    assert sorted(one.service for one in found) == ["b", "gateway"]
