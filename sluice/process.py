"""A process of a mesh: its arguments, settings and telemetry; its errors as one line and an exit code."""

import argparse
import asyncio
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from nats.errors import Error as NatsError
from opentelemetry.trace import Tracer

from sluice.errors import SetupError
from sluice.grpc_events import prompt_grpc_events
from sluice.interpreter import switch_threads_soon
from sluice.settings import Settings, SettingsError, load
from sluice.settings.mesh import Page
from sluice.startup import stop_event
from sluice.telemetry.environment import clean
from sluice.telemetry.instruments import Instruments
from sluice.telemetry.logs import log_to_stderr
from sluice.telemetry.metrics import measuring
from sluice.telemetry.tracing import start_tracing
from sluice.wire.connection import NatsUnreachable
from sluice.wire.subjects import is_token


@dataclass(frozen=True)
class Process:
    """What a process has when it starts.

    Attributes:
        id: its name, unique in the mesh.
        config: the file of its settings.
        stop: set by SIGTERM and SIGINT.
    """

    id: str
    settings: Settings
    config: Path
    tracer: Tracer
    instruments: Instruments
    stop: asyncio.Event


@dataclass(frozen=True)
class Program:
    """`python -m NAME --config FILE [--id ID]`.

    Attributes:
        name: of the process, and of its page of metrics in telemetry.prometheus.
        prefix: what ids begin with that are made up.
        serve: runs until `Process.stop` is set; raises SettingsError, SetupError, NatsUnreachable or an error of NATS.
    """

    name: Page
    about: str
    prefix: str
    serve: Callable[[Process], Awaitable[None]]
    has_callers: bool = False
    """Whether the trace contexts that it gets were made outside of the mesh."""
    reloads: bool = False
    """Whether SIGHUP reloads its settings (`sluice.wire.reload`): before it can, and while it drains, it is ignored."""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the process and return its exit code: 0 after a clean end, 1 after an error that `serve` may raise.

        Wrong arguments raise SystemExit (argparse).
        """
        parser = argparse.ArgumentParser(prog=self.name, description=self.about)
        parser.add_argument("--config", type=Path, required=True, help="the YAML configuration")
        parser.add_argument("--id", default="", help="name of this process; unset: a random one")
        options = parser.parse_args(arguments)
        if self.reloads:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            name = options.id or f"{self.prefix}-{secrets.token_hex(4)}"
            if not is_token(name):
                raise SettingsError("--id: use up to 64 letters, digits, '-' and '_'")
            settings = load(options.config)
            log_to_stderr(settings.telemetry.log_level, settings.telemetry.log_format)
            clean()
            switch_threads_soon()
            uvloop.run(self._run(settings, name, options.config))
        except (SettingsError, SetupError, NatsUnreachable) as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 1
        except NatsError as error:
            print(f"{self.name}: JetStream of NATS does not work: {error}", file=sys.stderr)
            return 1
        return 0

    async def _run(self, settings: Settings, name: str, config: Path) -> None:
        stop, service = stop_event(), f"sluice-{self.name}"
        telemetry, key = settings.telemetry, f"telemetry.prometheus.{self.name}"
        page = telemetry.prometheus.get(self.name)
        with prompt_grpc_events(), measuring(service, name, page, key) as metrics:
            instruments = metrics.instruments
            tracing = start_tracing(
                service,
                instruments,
                telemetry.trace_ratio,
                instance=name,
                trusts_callers=not self.has_callers,
            )
            try:
                await self.serve(Process(name, settings, config, tracing.tracer, instruments, stop))
            finally:
                await asyncio.to_thread(tracing.shutdown)
