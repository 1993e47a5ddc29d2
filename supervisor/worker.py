"""A supervised Triton alone: what a worker machine runs."""

import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from model_workers.deploy import render_repository
from sluice.settings import Settings
from sluice.startup import is_loopback
from supervisor import specs
from supervisor.mesh import triton_companion
from supervisor.plan import check_models, checked_port, plan_triton
from supervisor.readiness import reachable
from supervisor.supervisor import Supervisor
from supervisor.triton import wait_for_triton

logger = logging.getLogger(__name__)


@asynccontextmanager
async def running_worker(settings: Settings, host: str, port: int) -> AsyncIterator[str]:
    """Serves every model of ``settings`` on ``host:port`` while the block runs; its output is ours.

    ``triton.url`` and the models' ``triton_url`` say how others reach this worker, so they are not looked at.

    Raises:
        SetupError: something is missing, taken or did not start.
        SettingsError: a model cannot be served.
    """
    here = _served_here(settings)
    check_models(here)
    port = checked_port("triton.port", host, port, set())
    if not is_loopback(host):
        logger.warning("%s:%d is open without credentials: keep it in a closed network", host, port)
    with tempfile.TemporaryDirectory(prefix="sluice-worker-") as root:
        config = plan_triton(here, Path(root), host, port)
        render_repository(here, config.repository)
        supervisor = Supervisor()
        try:
            unit = supervisor.start(
                specs.triton_spec(config, log=None),
                triton_companion(config, here, lambda: unit.reloaded()),
            )
            address = f"{host}:{port}"
            await supervisor.during_start(
                wait_for_triton(reachable(address), settings.triton.start_s)
            )
            yield address
        finally:
            await supervisor.stop()


def _served_here(settings: Settings) -> Settings:
    models = tuple(model.model_copy(update={"triton_url": None}) for model in settings.models)
    triton = settings.triton.model_copy(update={"url": None})
    return settings.model_copy(update={"models": models, "triton": triton})
