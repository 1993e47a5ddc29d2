"""Runs a worker of a model with the engine "openai": `python -m model_workers.remote --config FILE --model NAME`.

It ends on SIGTERM or SIGINT; its sequences continue in other workers.
"""

import sluice.quick_start  # noqa: F401

# isort: split
import argparse
import asyncio
import logging
import os
import sys
from functools import partial
from pathlib import Path
from threading import Condition

import uvloop

from model_workers.engine.sequences import SequenceLimits
from model_workers.remote.api import ServerApi, find_context, find_text_tokens
from model_workers.remote.client import ServerClient
from model_workers.remote.engine import RemoteEngine
from model_workers.remote.key import check_key
from model_workers.remote.server import start_server
from model_workers.worker import Worker, notify
from sluice.errors import SetupError
from sluice.interpreter import freeze_heap
from sluice.settings import ModelSettings, SettingsError, load
from sluice.startup import LOOPBACK, stop_event
from sluice.telemetry.environment import clean
from sluice.telemetry.logs import log_to_stderr
from sluice.telemetry.names import SERVICE_WORKER
from sluice.telemetry.tracing import start_tracing

logger = logging.getLogger(__name__)


def main() -> int:
    """Run the process; return its exit code."""
    arguments = _arguments()
    try:
        settings = load(arguments.config)
        log_to_stderr(settings.telemetry.log_level, settings.telemetry.log_format)
        clean()
        model = settings.model(arguments.model)
        if model is None or model.server is None:
            raise SettingsError(f"{arguments.model!r} is no model with the engine openai")
        address = f"{arguments.host}:{arguments.port}"
        uvloop.run(_serve(model, arguments.number, address, settings.tls.mesh))
    except (SettingsError, SetupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(model: ModelSettings, number: int, address: str, tls: Path | None) -> None:
    assert model.server is not None
    stop, urls = stop_event(), model.server.urls
    check_key(model.name, model.server)
    tokens, context = find_text_tokens(model), find_context(model)
    engine: RemoteEngine
    url = urls[number % len(urls)]
    api = ServerApi(model.server, tokens, context, model.prefix_cache)
    async with ServerClient(api, url, lambda: engine.gate_changed()) as client:
        alone = len(model.triton_urls or model.triton_models) == 1
        limits = SequenceLimits.of(model, context)
        changed = Condition()
        loop = asyncio.get_running_loop()
        engine = RemoteEngine(client, limits, alone, loop, partial(notify, changed))
        tracing = start_tracing(SERVICE_WORKER)
        fault = partial(os._exit, 1)
        worker = Worker(model.name, engine, tracing.tracer, fault, changed, isolates=False)
        await client.health.look()
        watching = asyncio.create_task(client.health.run())
        worker.start()
        try:
            server = await start_server(worker, address, tls)
        except RuntimeError as error:
            raise SetupError(f"{address} cannot be listened on; choose another port") from error
        freeze_heap()
        logger.info("worker %s asks %s at %s for %s", worker.worker_id, url, address, model.name)
        await stop.wait()
        watching.cancel()
        await asyncio.to_thread(worker.stop)
        await server.stop(grace=1.0)
        await asyncio.to_thread(tracing.shutdown)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m model_workers.remote", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the YAML configuration")
    parser.add_argument("--model", required=True, help="the model's name in it")
    parser.add_argument("--number", type=int, default=0, help="which of its urls: counted round")
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on")
    parser.add_argument("--port", type=int, default=8001, help="gRPC port for batchers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
