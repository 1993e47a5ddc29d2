"""``python -m gateway --config FILE [--id ID]``: runs one gateway until SIGTERM or SIGINT, then drains.

SIGHUP reloads its safety and routing policies. The parts start in the order of `_serve` and stop in reverse.
"""

import sluice.quick_start  # noqa: F401

# isort: split
import argparse
import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from gateway.config.models import load_catalog
from gateway.config.policies import load_inspector
from gateway.config.reload import GatewayReload
from gateway.config.routers import load_router
from gateway.safety.text import skeleton
from gateway.server import Gateway
from sluice import settings as configuration
from sluice.errors import SetupError
from sluice.grpc_events import prompt_grpc_events
from sluice.settings import Settings, SettingsError
from sluice.settings.reload import reloading
from sluice.startup import (
    check_reach,
    freeze_heap,
    stop_event,
)
from sluice.telemetry.logs import log_to_stderr
from sluice.telemetry.metrics import measuring
from sluice.telemetry.names import SERVICE_GATEWAY
from sluice.telemetry.tracing import start_tracing, tracer
from sluice.wire.connection import NatsUnreachable
from sluice.wire.subjects import is_token


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 after a clean end, 1 when the gateway cannot start."""
    options = _parse(arguments)
    # A reload is not needed before the configuration has been read.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        settings, gateway_id = _load(options.config), _id(options.id)
        log_to_stderr(settings.telemetry.log_level, settings.telemetry.log_format)
        uvloop.run(_serve(settings, gateway_id, options.config))
    except (SettingsError, SetupError, NatsUnreachable) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: Settings, gateway_id: str, path: Path) -> None:
    stop = stop_event()
    catalog = load_catalog(settings)
    inspector = await asyncio.to_thread(load_inspector, settings, path)
    router = await asyncio.to_thread(load_router, settings, catalog.facts)
    page = settings.telemetry.prometheus.gateway
    with (
        prompt_grpc_events(),
        measuring(SERVICE_GATEWAY, gateway_id, page, "telemetry.prometheus.gateway") as metrics,
    ):
        provider = start_tracing(
            SERVICE_GATEWAY,
            metrics.registry,
            settings.telemetry.trace_ratio,
            settings.telemetry.trace_slow_s,
        )
        try:
            telemetry = tracer(SERVICE_GATEWAY), metrics.registry
            gateway = Gateway(settings, gateway_id, catalog, inspector, router, *telemetry)
            reload = GatewayReload(settings, path, inspector, catalog, gateway)
            async with gateway.running():
                freeze_heap()
                tables = asyncio.create_task(asyncio.to_thread(skeleton.tables))
                with reloading(path, reload):
                    await _first(stop, gateway.shared.peers.id_taken)
                await tables
            if gateway.shared.peers.id_taken.is_set():
                raise SetupError(f"--id: another gateway {gateway_id!r} is running")
            if inspector.dry_run is not None:
                logging.getLogger(__name__).info("%s", inspector.dry_run)
        finally:
            await asyncio.to_thread(provider.shutdown)


async def _first(*events: asyncio.Event) -> None:
    """Returns when one of ``events`` is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gateway", description="The gateway of a Sluice mesh.")
    parser.add_argument("--config", type=Path, required=True, help="the YAML configuration")
    parser.add_argument("--id", help="name of this process, unique in the mesh; unset: random")
    return parser.parse_args(arguments)


def _load(path: Path) -> Settings:
    settings = configuration.load(path)
    if settings.nats.url is None:
        raise SettingsError(f"{path}: nats.url: a gateway by itself needs a running NATS")
    check_reach(settings, "gateway.address", settings.gateway.address)
    if settings.http.address is not None:
        check_reach(settings, "http.address", settings.http.address)
    return settings


def _id(name: str | None) -> str:
    """The id is part of NATS subjects."""
    gateway_id = name or f"gw-{secrets.token_hex(4)}"
    if not is_token(gateway_id):
        raise SettingsError("--id: use up to 64 letters, digits, '-' and '_'")
    return gateway_id


if __name__ == "__main__":
    sys.exit(main())
