"""Batchers for tests: inside the test's loop, or as a process that can be killed."""

import asyncio
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from opentelemetry.trace import NoOpTracer, Tracer

from batcher.app import serve
from sluice.settings import BatcherSettings, ModelSettings, NatsSettings, Settings, TritonSettings
from sluice.settings.routing import RoutingSettings
from tests.support.settings import tuned

STOP_S = 60.0

ECHO = tuned(
    ModelSettings,
    name="echo",
    path="none",
    engine="echo",
    # So that what a test calls long takes long on any machine.
    echo_step_ms=2.0,
    slots=8,
    max_waiting_rows=8,
    context_tokens=10_000_000,
)


def settings_of(
    nats_url: str, triton_url: str, model: ModelSettings, batcher: BatcherSettings | None = None
) -> Settings:
    """The configuration of a batcher with one model; quick to lose patience."""
    return Settings(
        models=(model,),
        routing=RoutingSettings(default=model.name),
        nats=NatsSettings(url=nats_url),
        triton=TritonSettings(url=triton_url),
        batcher=batcher or tuned(BatcherSettings, heartbeat_ms=100, stall_s=1.0, drain_s=0.5),
    )


@asynccontextmanager
async def running_batcher(
    settings: Settings, tracer: Tracer | None = None, config: Path | None = None
) -> AsyncIterator[asyncio.Event]:
    """A batcher in this loop; gives the event that makes it drain. Its end is checked."""
    stop = asyncio.Event()
    serving = serve(settings, f"b-{secrets.token_hex(4)}", tracer or NoOpTracer(), stop, config)
    task = asyncio.create_task(serving)
    try:
        yield stop
    finally:
        stop.set()
        async with asyncio.timeout(STOP_S):
            await task


@contextmanager
def batcher_process(settings: Settings, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A batcher as a process of its own; its log is ``folder``/batcher.log."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "sluice.yaml"
    config.write_text(settings.to_yaml(), encoding="utf-8")
    command = (sys.executable, "-m", "batcher", "--config", str(config))
    with (
        (folder / "batcher.log").open("ab") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
