"""Certificates of servers: what gRPC serves with them, and what becomes of bad files."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from sluice import tls
from sluice.errors import SettingsError
from sluice.tls import (
    AUTHORITIES,
    CERTIFICATE,
    KEY,
    ClientContext,
    channel_credentials,
    read_pair,
    server_context,
    server_credentials,
)
from supervisor.certificates import Authority

BOUND_S = 60.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "tls")
    made.ensure(["server", "client"])
    return made


@asynccontextmanager
async def serving(credentials: grpc.ServerCredentials) -> AsyncIterator[str]:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(address: str, credentials: grpc.ChannelCredentials | None) -> None:
    """Raises AioRpcError when the handshake fails."""
    assert credentials is not None
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)


async def serial_at(address: str, authority: Authority, **limits: ssl.TLSVersion) -> int:
    """The serial number of the certificate that a server shows."""
    context = ssl.create_default_context(cafile=authority.ca)
    for name, version in limits.items():
        setattr(context, name, version)
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    async with asyncio.timeout(BOUND_S):
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        found = writer.get_extra_info("ssl_object")
        assert found.selected_alpn_protocol() == "h2"
        return int(found.getpeercert()["serialNumber"], 16)
    finally:
        writer.close()


async def test_calls_are_encrypted_with_http2_and_tls_of_today(authority: Authority) -> None:
    async with serving(server_credentials(authority.of("server"))) as address:
        await call(address, grpc.ssl_channel_credentials(authority.ca.read_bytes()))
        await serial_at(address, authority, maximum_version=ssl.TLSVersion.TLSv1_2)
        with (
            pytest.raises((ssl.SSLError, OSError)),
            pytest.warns(DeprecationWarning, match="TLSv1_1"),
        ):
            await serial_at(address, authority, maximum_version=ssl.TLSVersion.TLSv1_1)


async def test_where_clients_need_a_certificate_others_are_refused(authority: Authority) -> None:
    credentials = server_credentials(authority.of("server"), [authority.ca])
    async with serving(credentials) as address:
        await call(address, channel_credentials(authority.of("client")))
        with pytest.raises(grpc.aio.AioRpcError):
            await call(address, grpc.ssl_channel_credentials(authority.ca.read_bytes()))


async def test_renewed_files_are_served_and_broken_ones_are_not(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    folder = authority.of("server")
    async with serving(server_credentials(folder)) as address:
        first = await serial_at(address, authority)
        authority.issue("server")
        second = await serial_at(address, authority)
        assert second != first
        (folder / KEY).write_bytes((authority.of("client") / KEY).read_bytes())
        assert await serial_at(address, authority) == second
        (folder / CERTIFICATE).unlink()
        assert await serial_at(address, authority) == second
        authority.issue("server")
        assert await serial_at(address, authority) not in (first, second)
    kept = "reading certificates failed, the last ones stay in force"
    assert [r.message for r in caplog.records if r.levelname == "ERROR"] == [
        f"{kept}: {folder / KEY}: is not the key of {folder / CERTIFICATE}",
        f"{kept}: {folder / CERTIFICATE}: cannot be read: No such file or directory",
    ]


class _LastYear(datetime):
    """A clock that is a year late."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) - timedelta(days=365)


def test_each_bad_file_is_one_line_that_names_it(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = authority.of("server")
    (folder / KEY).write_text("none")
    with pytest.raises(SettingsError, match=f"{folder / KEY}: is not a PEM key"):
        read_pair(folder)
    (folder / CERTIFICATE).write_text("none")
    with pytest.raises(SettingsError, match=f"{folder / CERTIFICATE}: holds no PEM certificate"):
        read_pair(folder)
    Authority(authority.folder, days=0).issue("server")
    with pytest.raises(SettingsError, match=f"{folder / CERTIFICATE}: has expired on 20"):
        read_pair(folder)
    monkeypatch.undo()
    authority.issue("server")
    with monkeypatch.context() as patched:
        patched.setattr(tls, "datetime", _LastYear)
        with pytest.raises(SettingsError, match=f"{folder / CERTIFICATE}: .*compare the clocks"):
            read_pair(folder)
    (folder / AUTHORITIES).unlink()
    with pytest.raises(SettingsError, match=f"{folder / AUTHORITIES}: cannot be read"):
        channel_credentials(folder)


def test_a_connection_that_lasts_takes_renewed_files(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    context = ClientContext(authority.of("client"))
    context.refresh()
    assert not caplog.records
    (authority.of("client") / KEY).write_text("none")
    context.refresh()
    authority.issue("client")
    context.refresh()
    assert [r.levelname for r in caplog.records] == ["ERROR", "INFO"]


async def test_other_servers_take_renewed_files_too(authority: Authority) -> None:
    folder = authority.of("server")
    context = server_context(folder, [], "h2")
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context
    )
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        first = await serial_at(address, authority)
        (folder / KEY).write_text("none")
        assert await serial_at(address, authority) == first
        authority.issue("server")
        assert await serial_at(address, authority) != first
