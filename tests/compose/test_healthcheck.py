"""The health checks of the containers, against real servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import nats
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from nats.aio.client import Client

from compose import healthcheck
from sluice.internal.v1.control_pb2 import BatcherReport
from sluice.startup import free_port
from sluice.wire import subjects
from sluice.wire.codec import pack
from sluice.wire.permissions import BATCHER
from tests.support.certificates import connected, secured_nats

BOUND_S = 1.5
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def serving(status: int) -> AsyncIterator[str]:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    await servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


@contextlib.asynccontextmanager
async def reporting(to: str | Client, report: BatcherReport) -> AsyncIterator[None]:
    """Sends ``report`` to a NATS, as often as a check may need it."""
    client = await nats.connect(to) if isinstance(to, str) else to

    async def send() -> None:
        while True:
            await client.publish(subjects.report(report.batcher), pack(report))
            await asyncio.sleep(0.02)

    sender = asyncio.create_task(send())
    try:
        yield
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        if isinstance(to, str):
            await client.close()


async def check(*arguments: str) -> int:
    return await asyncio.to_thread(healthcheck.main, arguments, BOUND_S)


@pytest.mark.parametrize(
    ("status", "code", "word"), [(SERVING, 0, ""), (NOT_SERVING, 1, "NOT_SERVING")]
)
async def test_a_server_is_well_when_it_serves(
    status: int, code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(status) as address:
        assert await check("grpc", address) == code
    assert word in capsys.readouterr().out


@pytest.mark.parametrize(
    ("report", "code", "word"),
    [
        (BatcherReport(batcher="b1"), 0, ""),
        (BatcherReport(batcher="b1", leaving=True), 1, "leaving"),
        (BatcherReport(batcher="another"), 1, "TimeoutError"),
    ],
    ids=["well", "leaving", "silent"],
)
async def test_a_batcher_is_well_when_its_reports_come(
    nats_url: str, report: BatcherReport, code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with reporting(nats_url, report):
        assert await check("batcher", nats_url, "b1") == code
    assert word in capsys.readouterr().out


async def test_with_certificates_it_shows_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {"batcher": (BATCHER, "*")}
    async with (
        secured_nats(tmp_path, users) as (url, authority),
        connected(url, authority, BATCHER, "batcher") as reporter,
    ):
        monkeypatch.setenv("SLUICE_TLS__MESH", str(authority.of("batcher")))
        async with reporting(reporter, BatcherReport(batcher="b1")):
            assert await check("batcher", url, "b1") == 0


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [("grpc {}", 1, "UNAVAILABLE"), ("batcher nats://{} b1", 1, "batcher"), ("", 2, "HOST:PORT")],
)
async def test_exit_codes_without_anybody_at_the_address(
    arguments: str, code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await check(*arguments.format(f"127.0.0.1:{free_port()}").split()) == code
    assert word in capsys.readouterr().out
