"""Run a whole mesh on this machine while a block runs, or a tritonserver alone.

A mesh is nats-server, a tritonserver for each worker, batcher, gateway and jobs.

`sluice up`, `sluice demo`, tests and benchmarks use `running_mesh`, `sluice worker` uses `running_worker`. `Mesh.start`
reads as the start order, and backwards as the order of the stop: the gateway drains while its servers still run.
"""

import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from model_workers.deploy import render_repository, render_workers
from sluice.errors import SetupError
from sluice.settings import Settings
from sluice.startup import is_loopback, reachable
from sluice.tls import AUTHORITIES
from supervisor.child import expect_end
from supervisor.disk import check_room, nats_watcher
from supervisor.health import REMOTE_S, wait_until_reachable, wait_until_serving
from supervisor.model_processes import kill_when_stopped, triton_watcher
from supervisor.nats import wait_for_nats
from supervisor.plan import (
    TRITON,
    MeshPlan,
    RemoteConfig,
    ServerConfig,
    certify,
    changed,
    check_models,
    make_plan,
    plan_triton,
)
from supervisor.ports import Ports
from supervisor.reload import Reload, start_workers
from supervisor.specs import nats_spec, server_spec, triton_spec
from supervisor.state import DEFAULTS, MeshState, Origin, StateDir, write_atomically
from supervisor.supervisor import Supervisor
from supervisor.triton import wait_for_triton

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Takes one step of the start or the stop of a mesh, in words."""
GATEWAY_START_S: Final = 60.0
"""How long remote workers, jobs and gateways may take to be ready, on top of `triton.start_s`, in seconds."""


class Mesh:
    """A running mesh.

    Processes are named "nats", "triton-MODEL", "remote-MODEL", "batcher", "gateway" and "jobs"; external ones are
    missing. From the second of a kind on the names have a number: "gateway.1", "triton-MODEL.1".
    """

    def __init__(
        self, plan: MeshPlan, on_progress: Progress = lambda _: None, origin: Origin = DEFAULTS
    ) -> None:
        """`on_progress` is told each step of the start; `origin`: where the settings came from."""
        self._on_progress = on_progress
        self.state_dir = plan.state
        self.ready_s = 0.0
        self._plan = plan
        self._ready = False
        self.supervisor = Supervisor(self._write_state)
        self._reload = Reload(plan, self.supervisor, origin, self._write_state)

    @property
    def settings(self) -> Settings:
        """The settings with every address filled in, as of the last reload."""
        return self._reload.settings

    @property
    def address(self) -> str:
        """Where clients call the gateway, or the gateways with commas between them."""
        return ",".join(reachable(gateway.address) for gateway in self._plan.gateways)

    @property
    def http(self) -> str | None:
        """Where clients call OpenAI's API, in the same order; None: nowhere."""
        served = [reachable(gateway.http) for gateway in self._plan.gateways if gateway.http]
        return ",".join(served) or None

    @property
    def nats_url(self) -> str:
        """URL of the embedded or external server; may have a password, which `redact_url` removes."""
        assert self.settings.nats.url is not None
        return self.settings.nats.url

    @property
    def ca(self) -> Path | None:
        """The authorities of the gateways' certificates, for callers; None: they are not encrypted."""
        if self._plan.authority is not None and self.settings.tls.callers is None:
            return self._plan.authority.ca
        serving = self.settings.tls.serving
        return None if serving is None else serving / AUTHORITIES

    def worker_address(self, model: str) -> str:
        """Return host and port of the first worker of `model`."""
        served = self.settings.model(model)
        assert served is not None, f"no model {model}"
        return served.triton_urls[0]

    @property
    def state(self) -> MeshState:
        """The contents of the state file."""
        return MeshState(
            pid=self.supervisor.pid,
            started_unix_ms=self.supervisor.started_unix_ms,
            ready=self._ready,
            stop_s=self.supervisor.stop_s,
            address=self.address,
            http=self.http,
            ca=None if self.ca is None else str(self.ca),
            nats_url=self.nats_url,
            processes=self.supervisor.states,
            origin=self._reload.origin,
        )

    async def start(self) -> None:
        """Start everything and return when every gateway is ready.

        Raises:
            SetupError: a process ended, or a server was not ready in time.
            SettingsError: a certificate cannot be used, or the workers do not fit on their devices.
            TimeoutError, NatsUnreachable: the embedded NATS did not answer in time.
        """
        begun, during_start = time.monotonic(), self.supervisor.during_start
        tls, gateways = self.settings.tls.mesh, self.address.split(",")
        self._prepare_files()
        bound_s = self.settings.triton.start_s + GATEWAY_START_S
        models = [model.name for model in self.settings.models if model.server is None]
        elsewhere = [model.name for model in self.settings.models if model.server is not None]
        if self._plan.nats is not None:
            self._on_progress("starting nats-server")
            spec = nats_spec(self._plan.nats, self.state_dir)
            watcher = nats_watcher(self._plan.nats.store, self.state_dir.log(spec.name))
            self.supervisor.start(spec, watcher)
            await during_start(wait_for_nats(self.nats_url, self.settings.nats.connect_s, tls))
        self._on_progress(f"loading {', '.join(models)}")
        start_workers(self.supervisor, self._plan)
        for server in (self._plan.batcher, *self._plan.gateways, *self._plan.jobs):
            self.supervisor.start(server_spec(self._plan, server), kill_when_stopped)
        servers: list[RemoteConfig | ServerConfig] = [*self._plan.remotes, *self._plan.jobs]
        for one in servers:
            await during_start(wait_until_reachable(one.name, one.address, bound_s, tls))
        for address in gateways:
            await during_start(wait_until_serving(address, models, bound_s, tls))
        for model in elsewhere:
            try:
                await wait_until_serving(gateways[0], [model], REMOTE_S, tls)
            except SetupError:
                logger.warning(
                    "model %s is not ready: its server does not respond (see the log of remote-%s)",
                    model,
                    model,
                )
        self.ready_s = time.monotonic() - begun
        self._ready = True
        await self._reload.start()
        self._write_state()

    async def stop(self) -> None:
        """End everything in reverse order, within bounds; at once when cancelled."""
        self._ready = False
        await self._reload.stop()
        await self.supervisor.stop()

    def _prepare_files(self) -> None:
        state = self.state_dir
        certify(self._plan)
        for folder in (state.models, state.versions):
            shutil.rmtree(folder, ignore_errors=True)
        render_workers(self._plan.models, state.models)
        write_atomically(state.config, self.settings.to_yaml())
        self._write_state()

    def _write_state(self) -> None:
        self.state_dir.write(self.state)


@asynccontextmanager
async def running_mesh(
    settings: Settings,
    state_dir: Path | None = None,
    on_progress: Progress = lambda _: None,
    origin: Origin = DEFAULTS,
) -> AsyncIterator[Mesh]:
    """Run a mesh that is ready when the block begins and stopped when it ends.

    Without `state_dir` all files are in a temporary folder that is removed at the end; only after a failed start that
    wrote logs it stays.
    Port 0 in `gateway.address` takes a free one.

    Raises:
        SetupError: something is missing, taken, broken or did not start; one line that says what to do.
        SettingsError: a model cannot be served, or a setting does not fit the others.
        TimeoutError, NatsUnreachable: the embedded NATS did not answer in time.
    """
    with _state_root(state_dir) as root:
        state = StateDir(root)
        with state.lock():
            # A mesh whose supervisor and reaper were killed together goes on; two would share its files.
            end_leftovers(state.read())
            plan = make_plan(settings, state)
            if plan.nats is not None:
                check_room(settings, plan.nats.store)
            mesh = Mesh(plan, on_progress, origin)
            try:
                await mesh.start()
                yield mesh
            finally:
                await mesh.stop()
                state.forget()


def end_leftovers(last: MeshState | None) -> int:
    """Kill the processes that a supervisor left behind, by its last state; return how many.

    Raises:
        SetupError: a process does not end.
    """
    leftovers = 0
    for process in last.processes if last else ():
        if process.pid is not None and process.alive:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
                leftovers += 1
                expect_end(process.pid, process.name)
    return leftovers


@contextmanager
def _state_root(named: Path | None) -> Iterator[Path]:
    """`named`, else a folder that is removed at the end, unless a start failed that wrote logs."""
    if named is not None:
        yield named
        return
    root = Path(tempfile.mkdtemp(prefix="sluice-"))
    keep = False
    try:
        yield root
    except SetupError:
        keep = any(root.glob("logs/*"))
        raise
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)


@asynccontextmanager
async def running_worker(
    settings: Settings, host: str, port: int, tritonserver: str | None = None
) -> AsyncIterator[str]:
    """Serve every model of `settings` on `host:port` while the block runs; its output is ours.

    A server that ends, or that has lost a model's Python process, is started again. `tritonserver`: a program by its
    path or its name on PATH; None: that of the wheel.

    `triton.url` and the models' `triton_url` say how others reach this worker, so they are ignored. Models that
    somebody else's server computes have workers of their own, `model_workers.remote`.

    Raises:
        SetupError: something is missing, taken or did not start.
        SettingsError: a model cannot be served.
        TimeoutError: the models were not loaded within `triton.start_s`.
    """
    here = _served_here(settings)
    check_models(here)
    port = Ports().take("triton.port", host, port)
    if not is_loopback(host) and here.tls.mesh is None:
        logger.warning(
            "%s:%d accepts calls without credentials: keep it in a closed network", host, port
        )
    with tempfile.TemporaryDirectory(prefix="sluice-worker-") as root:
        models = tuple(worker for model in here.models for worker in model.triton_models)
        config = plan_triton(here, Path(root), TRITON, models, host, port, tritonserver)
        render_repository(here, config.repository)
        supervisor, start_s = Supervisor(), settings.triton.start_s
        try:
            supervisor.start(triton_spec(config, log=None), triton_watcher(config, start_s))
            await supervisor.during_start(wait_for_triton(config.address, start_s, config.tls))
            yield f"{host}:{port}"
        finally:
            await supervisor.stop()


def _served_here(settings: Settings) -> Settings:
    models = tuple(
        model.model_copy(update={"triton_url": None})
        for model in settings.models
        if model.server is None
    )
    if not models:
        raise SetupError(
            "models: other servers compute all of them; run: "
            f"python -m model_workers.remote --config FILE --model {settings.models[0].name}"
        )
    return changed(settings.model_copy(update={"models": models}), triton={"url": None})
