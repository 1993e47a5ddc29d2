"""The health checks of the containers, against real servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import nats
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from compose import healthcheck
from sluice.internal.v1.control_pb2 import BatcherReport
from sluice.startup import free_port
from sluice.wire import subjects
from sluice.wire.codec import pack
from sluice.wire.permissions import BATCHER
from tests.support.certificates import connected, secured_nats

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
async def reporting(nats_url: str, report: BatcherReport) -> AsyncIterator[None]:
    """Sends ``report`` whenever somebody has subscribed, as often as a check may need it."""
    client = await nats.connect(nats_url)

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
        await client.close()


async def test_a_server_that_serves_is_well() -> None:
    async with serving(SERVING) as address:
        await healthcheck.check_grpc(address)


async def test_a_server_that_is_not_ready_is_not_well() -> None:
    async with serving(NOT_SERVING) as address:
        with pytest.raises(healthcheck.NotWellError, match="NOT_SERVING"):
            await healthcheck.check_grpc(address)


async def test_with_certificates_it_shows_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {"batcher": (BATCHER, "*")}
    async with (
        secured_nats(tmp_path, users) as (url, authority),
        connected(url, authority, BATCHER, "batcher") as reporter,
    ):
        monkeypatch.setenv("SLUICE_TLS__MESH", str(authority.of("batcher")))
        report = BatcherReport(batcher="b1")

        async def send() -> None:
            while True:
                await reporter.publish(subjects.report("b1"), pack(report))
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(send())
        await healthcheck.check_batcher(url, "b1")
        sending.cancel()


async def test_nobody_at_the_address_is_not_well() -> None:
    with pytest.raises(healthcheck.NotWellError, match="UNAVAILABLE"):
        await healthcheck.check_grpc(f"127.0.0.1:{free_port()}")


async def test_a_batcher_that_reports_is_well(nats_url: str) -> None:
    async with reporting(nats_url, BatcherReport(batcher="b1")):
        await healthcheck.check_batcher(nats_url, "b1")


async def test_a_batcher_that_is_leaving_is_not_well(nats_url: str) -> None:
    async with reporting(nats_url, BatcherReport(batcher="b1", leaving=True)):
        with pytest.raises(healthcheck.NotWellError, match="leaving"):
            await healthcheck.check_batcher(nats_url, "b1")


async def test_a_batcher_whose_reports_do_not_come_is_not_well(nats_url: str) -> None:
    async with reporting(nats_url, BatcherReport(batcher="another")):
        with pytest.raises(healthcheck.NotWellError, match="no report of batcher b1"):
            await healthcheck.check_batcher(nats_url, "b1", timeout_s=0.3)


async def test_a_batcher_without_nats_is_not_well() -> None:
    with pytest.raises(healthcheck.NotWellError, match="no report"):
        await healthcheck.check_batcher(f"nats://127.0.0.1:{free_port()}", "b1", timeout_s=0.3)


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert healthcheck.main(["grpc", f"127.0.0.1:{free_port()}"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().out
    assert healthcheck.main([]) == 2
