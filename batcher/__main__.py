"""``python -m batcher --config FILE [--id ID]``: one batcher process; ends after a drain on SIGTERM or SIGINT."""

import sluice.quick_start  # noqa: F401

# isort: split
import argparse
import asyncio
import sys
from pathlib import Path

import uvloop
from nats.errors import Error as NatsError

from batcher.app import new_id, serve
from sluice.errors import SetupError
from sluice.grpc_events import prompt_grpc_events
from sluice.settings import Settings, SettingsError, load
from sluice.startup import freeze_heap, stop_event
from sluice.telemetry import names
from sluice.telemetry.logs import log_to_stderr
from sluice.telemetry.metrics import measuring
from sluice.telemetry.tracing import start_tracing, tracer
from sluice.wire.connection import NatsUnreachable


def main() -> int:
    """The process; returns its exit code."""
    arguments = _arguments()
    try:
        settings = load(arguments.config)
        log_to_stderr(settings.telemetry.log_level, settings.telemetry.log_format)
        uvloop.run(_serve(settings, arguments.id or new_id(), arguments.config))
    except (SettingsError, SetupError, NatsUnreachable) as error:
        print(f"batcher: {error}", file=sys.stderr)
        return 2
    except NatsError as error:
        print(f"batcher: JetStream of NATS does not work: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(settings: Settings, batcher: str, config: Path) -> None:
    stop = stop_event()
    page = settings.telemetry.prometheus.batcher
    with (
        prompt_grpc_events(),
        measuring(names.SERVICE_BATCHER, batcher, page, "telemetry.prometheus.batcher") as metrics,
    ):
        provider = start_tracing(names.SERVICE_BATCHER, metrics.registry)
        freeze_heap()
        try:
            spans = tracer(names.SERVICE_BATCHER)
            await serve(settings, batcher, spans, stop, config, metrics.registry)
        finally:
            await asyncio.to_thread(provider.shutdown)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="batcher", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the YAML configuration")
    parser.add_argument("--id", default="", help="this batcher's id; made up when not given")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
