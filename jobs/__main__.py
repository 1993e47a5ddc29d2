"""``python -m jobs --config FILE [--id ID]``: runs jobs until SIGTERM or SIGINT, then leaves them to others."""

import sluice.quick_start  # noqa: F401

# isort: split
import argparse
import asyncio
import sys
from pathlib import Path

import uvloop

from jobs.app import new_id, serve
from sluice.errors import SetupError
from sluice.grpc_events import prompt_grpc_events
from sluice.settings import Settings, SettingsError, load
from sluice.startup import freeze_heap, stop_event
from sluice.telemetry.logs import log_to_stderr
from sluice.telemetry.metrics import measuring
from sluice.telemetry.names import SERVICE_JOBS
from sluice.telemetry.tracing import start_tracing, tracer
from sluice.wire.connection import NatsUnreachable


def main() -> int:
    """The process; returns its exit code."""
    arguments = _arguments()
    try:
        settings = load(arguments.config)
        log_to_stderr(settings.telemetry.log_level, settings.telemetry.log_format)
        uvloop.run(_serve(settings, arguments.id or new_id()))
    except (SettingsError, SetupError, NatsUnreachable) as error:
        print(f"jobs: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(settings: Settings, process: str) -> None:
    stop = stop_event()
    page = settings.telemetry.prometheus.jobs
    with (
        prompt_grpc_events(),
        measuring(SERVICE_JOBS, process, page, "telemetry.prometheus.jobs") as metrics,
    ):
        provider = start_tracing(SERVICE_JOBS, metrics.registry, settings.telemetry.trace_ratio)
        freeze_heap()
        try:
            await serve(settings, process, tracer(SERVICE_JOBS), stop, metrics.registry)
        finally:
            await asyncio.to_thread(provider.shutdown)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="jobs", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the YAML configuration")
    parser.add_argument("--id", default="", help="name of this process; made up when not given")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
