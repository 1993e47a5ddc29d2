"""A real nats-server for a test."""

import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

import nats
from nats.js.errors import APIError

from sluice.startup import free_port
from supervisor.nats import NatsConfig, nats_command, wait_for_nats

START_S: Final = 60.0
STOP_S: Final = 60.0
OF_THE_MESH: Final = ("SLUICE_", "KV_SLUICE_")


@asynccontextmanager
async def running_nats(folder: Path, port: int | None = None) -> AsyncIterator[str]:
    """Runs a server with JetStream on loopback, its files in ``folder``; gives its URL.

    A second one with the same ``folder`` and ``port`` finds what the first one stored.
    """
    with nats_process(folder, port or free_port()) as url:
        await wait_for_nats(url, START_S)
        yield url


@contextmanager
def nats_process(folder: Path, port: int) -> Iterator[str]:
    """As `running_nats`, but without waiting until it answers."""
    config = NatsConfig(port=port, store=folder / "store")
    with nats_process_of(nats_command(config, folder / "nats.conf"), folder):
        yield config.url


@contextmanager
def nats_process_of(command: Sequence[str], folder: Path) -> Iterator[None]:
    """The server while the block runs."""
    with (
        (folder / "nats.log").open("ab") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            end(process)


async def delete_streams(url: str) -> None:
    """Deletes all streams with their consumers, buckets and object stores included.

    Those of the mesh to which nobody has written stay: they are as new, and each gateway has a dozen.
    """
    client = await nats.connect(url)
    try:
        jetstream = client.jetstream()
        for stream in await jetstream.streams_info():
            name, state = stream.config.name, stream.state
            assert name is not None
            if state.last_seq or state.consumer_count or not name.startswith(OF_THE_MESH):
                # One that is made again at once under its name would sometimes have its messages again.
                with suppress(APIError):  # one that denies it
                    await jetstream.purge_stream(name)
                await jetstream.delete_stream(name)
    finally:
        await client.close()


def end(process: subprocess.Popen[bytes], bound_s: float = STOP_S) -> None:
    """SIGTERM, and SIGKILL for what does not listen."""
    process.terminate()
    try:
        process.wait(bound_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
