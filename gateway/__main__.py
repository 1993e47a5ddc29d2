"""``python -m gateway --config FILE [--id ID]``: runs one gateway until SIGTERM or SIGINT, then drains.

SIGHUP and `sluice reload` reload its policies, models, limits and identities. The parts start in the order of `_serve`
and stop in reverse.
"""

import sluice.quick_start  # noqa: F401

# isort: split
import asyncio
import sys
from pathlib import Path

from gateway.config.policies import load_all
from gateway.server import Gateway
from sluice.interpreter import freeze_heap
from sluice.process import Process, Program
from sluice.settings import Settings, SettingsError
from sluice.startup import check_reach
from sluice.wire.reload import reloading


async def _serve(process: Process) -> None:
    settings, path = process.settings, process.config
    _check(settings, path)
    policies = await asyncio.to_thread(load_all, settings)
    gateway = Gateway(settings, process.id, policies, process.tracer, process.instruments, load_all)
    async with gateway.running() as nats_client:
        freeze_heap()
        async with reloading(path, gateway.reload, nats_client):
            await process.stop.wait()


def _check(settings: Settings, path: Path) -> None:
    if settings.nats.url is None:
        raise SettingsError(f"{path}: nats.url: a gateway by itself needs a running NATS")
    check_reach(settings, "gateway.address", settings.gateway.address)
    if settings.http.address is not None:
        check_reach(settings, "http.address", settings.http.address)


main = Program("gateway", __doc__, "gw", _serve, has_callers=True, reloads=True).main

if __name__ == "__main__":
    sys.exit(main())
