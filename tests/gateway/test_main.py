"""The process: what it says when it cannot start, and how it ends."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.__main__ import main
from sluice.client import AsyncClient
from sluice.settings import NatsSettings
from sluice.startup import free_port
from supervisor.certificates import Authority
from tests.gateway.kit.batcher import wire_batcher
from tests.gateway.kit.wire import MODELS, settings_for

BOUND_S = 60.0


def config(tmp_path: Path, model_folder: Path, url: str | None, address: str) -> Path:
    path = tmp_path / "sluice.yaml"
    settings = settings_for(model_folder, url, address=address)
    path.write_text(settings.to_yaml(), encoding="utf-8")
    return path


def fails(capsys: pytest.CaptureFixture[str], path: Path, *more: str) -> str:
    assert main(["--config", str(path), *more]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    return line


AWAY = "nats://127.0.0.1:1"
JWT = [{"issuer": "https://login.example.org", "audience": "sluice", "jwks": "/no/jwks.json"}]


@pytest.mark.parametrize(
    ("url", "address", "variables", "more", "says"),
    [
        (None, "127.0.0.1:0", {}, (), "nats.url"),
        (AWAY, "127.0.0.1:0", {}, (), "does not answer within 0.2 s"),
        (AWAY, "0.0.0.0:0", {}, (), "set gateway.allow_remote"),
        (AWAY, "0.0.0.0:0", {"GATEWAY__ALLOW_REMOTE": "true"}, (), "does not answer"),
        (AWAY, "127.0.0.1:0", {}, ("--id", "a.b"), "--id"),
        (AWAY, "127.0.0.1:0", {"SAFETY__DEFAULT": "nope"}, (), "safety.default: no policy 'nope'"),
        (
            "",
            "127.0.0.1:0",
            {"IDENTITY__JWT": json.dumps(JWT)},
            (),
            "gateway: identity.jwt.0.jwks: /no/jwks.json cannot be used: No such file",
        ),
    ],
)
def test_what_keeps_it_from_starting_is_one_line(
    nats_server: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str | None,
    address: str,
    variables: dict[str, str],
    more: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.setattr(NatsSettings, "connect_s", 0.2)
    for name, value in variables.items():
        monkeypatch.setenv(f"SLUICE_{name}", value)
    path = config(tmp_path, model_folder, nats_server if url == "" else url, address)
    assert says in fails(capsys, path, *more)


def test_what_is_missing_or_taken_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: Path
) -> None:
    path = config(tmp_path, tmp_path / "nothing", AWAY, "127.0.0.1:0")
    assert "does not exist" in fails(capsys, path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = fails(capsys, config(tmp_path, model_folder, AWAY, address))
    assert line.startswith(f"gateway: gateway.address: {address} is in use by ")


def test_remote_address_serves_encrypted_identified_callers(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = config(tmp_path, model_folder, "nats://127.0.0.1:1", "0.0.0.0:0")
    authority = Authority(tmp_path / "tls")
    authority.ensure(["gateway", "other"])
    monkeypatch.setattr(NatsSettings, "connect_s", 0.2)
    monkeypatch.setenv("SLUICE_TLS__CALLERS", str(authority.of("gateway")))
    assert "callers do not say who they are (section identity)" in fails(capsys, path)
    monkeypatch.setenv("SLUICE_IDENTITY__API_KEYS", "true")
    assert "does not answer" in fails(capsys, path)
    key = authority.of("gateway") / "tls.key"
    key.write_bytes((authority.of("other") / "tls.key").read_bytes())
    assert f"{key}: is not the key of " in fails(capsys, path)


async def test_the_process_serves_until_sigterm(
    nats_url: str, tmp_path: Path, model_folder: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    path = config(tmp_path, model_folder, nats_url, address)
    with gateway_process(path) as process:
        async with wire_batcher(nats_url) as batcher, grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="model.small")
            await stub.Check(request, wait_for_ready=True, timeout=BOUND_S)
            await batcher.report(*MODELS)
            call = stub.Watch(request, timeout=BOUND_S)
            while (await call.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            call.cancel()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0
    assert f"serves gRPC on {address}" in log
    assert "stopped" in log
    assert "Traceback" not in log


async def test_a_hangup_swaps_the_policies_and_a_broken_file_does_not(
    nats_url: str, tmp_path: Path, model_folder: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    path = config(tmp_path, model_folder, nats_url, address)
    text = path.read_text(encoding="utf-8").replace("safety: {}", "")
    path.write_text(text, encoding="utf-8")
    with gateway_process(path) as process:
        async with AsyncClient(address) as client:
            assert process.stderr is not None
            lines = read_lines(process.stderr)
            await line_with(lines, "serves gRPC on")
            assert (await client.check_safety("x")).policy.startswith("default@")
            path.write_text(text + "safety: {default: two, policies: {two: {}}}\n")
            process.send_signal(signal.SIGHUP)
            await line_with(lines, "reloaded configuration")
            assert (await client.check_safety("x")).policy.startswith("two@")
            for broken, says in (
                ("safety: {default: nope}\n", "safety.default: no policy 'nope'"),
                ("telemetry: {log_level: debug}\n", "telemetry.log_level: cannot be changed"),
            ):
                kept = re.sub(r"telemetry:\n(  .*\n)*", "", text) if "telemetry" in broken else text
                path.write_text(kept + broken)
                process.send_signal(signal.SIGHUP)
                assert says in await line_with(
                    lines, "reload failed, the configuration stays in force"
                )
            assert (await client.check_safety("x")).policy.startswith("two@")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, BOUND_S) == 0


def read_lines(stream: IO[str]) -> "asyncio.Queue[str]":
    """The lines of ``stream`` as they come; a thread reads them."""
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in stream:
            loop.call_soon_threadsafe(lines.put_nowait, line)

    threading.Thread(target=read, daemon=True).start()
    return lines


async def line_with(lines: "asyncio.Queue[str]", words: str) -> str:
    async with asyncio.timeout(BOUND_S):
        while words not in (line := await lines.get()):
            pass
    return line


@contextmanager
def gateway_process(path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "gateway", "--config", str(path), "--id", "gw1"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, cwd=root, env=os.environ, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
