"""A whole mesh on this machine, as long as a block runs: nats-server, tritonserver, batcher, gateway.

`sluice up`, `sluice demo`, tests and benchmarks all use `running_mesh`. `Mesh.start` reads as the start order, and
backwards as the order of the stop: the gateway drains while everything behind it still works.
"""

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from model_workers.deploy import render_repository
from sluice.errors import SetupError
from sluice.settings import Settings
from supervisor import specs
from supervisor.child import Child
from supervisor.nats import wait_for_nats
from supervisor.plan import MeshPlan, make_plan
from supervisor.readiness import reachable, wait_until_serving
from supervisor.state import MeshState, StateDir, write_atomically
from supervisor.stubs import StubWatch
from supervisor.supervisor import Supervisor
from supervisor.triton import TritonConfig, remove_shared_memory, stub_pids
from supervisor.unit import Companion, Unit

GATEWAY_START_S: Final = 60.0
"""What batcher and gateway may take on top of NATS and Triton, seconds."""


class Mesh:
    """A running mesh. Processes are named "nats", "triton", "batcher", "gateway"; external ones are missing."""

    def __init__(self, plan: MeshPlan) -> None:
        self.settings = plan.settings
        self.state_dir = plan.state
        self.ready_s = 0.0
        self._plan = plan
        self._ready = False
        self._supervisor = Supervisor(self._write_state)

    @property
    def address(self) -> str:
        """Where clients call the gateway."""
        return reachable(self.settings.gateway.address)

    @property
    def nats_url(self) -> str:
        """Of the embedded or the external server."""
        assert self.settings.nats.url is not None
        return self.settings.nats.url

    @property
    def triton_url(self) -> str | None:
        """Host and port of gRPC; None when every model names its own."""
        return self.settings.triton.url

    @property
    def config_path(self) -> Path:
        """The settings with every address filled in."""
        return self.state_dir.config

    @property
    def processes(self) -> dict[str, int]:
        """Pids of what runs now, by name."""
        return self._supervisor.pids

    @property
    def stubs(self) -> dict[str, int]:
        """Pids of the Python processes of the embedded models that live now, by model."""
        pid = self.processes.get(specs.TRITON)
        found = stub_pids(pid) if pid is not None else {}
        return {instance.rsplit("_", 2)[0]: stub for instance, stub in found.items()}

    @property
    def state(self) -> MeshState:
        """What the state file says."""
        return MeshState(
            pid=self._supervisor.pid,
            started_unix_ms=self._supervisor.started_unix_ms,
            ready=self._ready,
            stop_s=self._supervisor.stop_s,
            address=self.settings.gateway.address,
            nats_url=self.nats_url,
            triton_url=self.triton_url,
            processes=self._supervisor.states,
        )

    def unit(self, name: str) -> Unit:
        """One process with its life; KeyError when the mesh does not run it."""
        return self._supervisor.unit(name)

    def kill(self, name: str, sent: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to the process ``name``, which is running; returns its pid. The supervisor starts it again."""
        child = self.unit(name).child
        assert child is not None, f"{name} does not run now"
        child.send(sent)
        return child.pid

    async def wait_for(self, condition: Callable[[], bool], bound_s: float) -> None:
        """Returns when ``condition`` holds, which is looked at after every change of a process; else TimeoutError."""
        await self._supervisor.wait_for(condition, bound_s)

    async def wait_until_serving(self, bound_s: float) -> None:
        """Returns when the gateway says SERVING; SetupError when it does not in time."""
        await wait_until_serving(self.address, bound_s)

    async def start(self) -> None:
        """Starts everything and returns when the gateway is ready.

        Raises:
            SetupError: a process ended, or the gateway was not ready in time.
        """
        begun = time.monotonic()
        self._prepare_files()
        bound_s = self.settings.triton.start_s + GATEWAY_START_S
        if self._plan.nats is not None:
            self._supervisor.start(specs.nats_spec(self._plan.nats, self.state_dir))
            await self._supervisor.during_start(
                wait_for_nats(self.nats_url, self.settings.nats.connect_s)
            )
        if self._plan.triton is not None:
            self._start_triton(self._plan.triton)
        self._supervisor.start(specs.batcher_spec(self._plan))
        self._supervisor.start(specs.gateway_spec(self._plan))
        await self._supervisor.during_start(self.wait_until_serving(bound_s))
        self.ready_s = time.monotonic() - begun
        self._ready = True
        self._write_state()

    async def stop(self) -> None:
        """Ends everything in reverse order, within bounds; at once when cancelled."""
        self._ready = False
        await self._supervisor.stop()

    def _prepare_files(self) -> None:
        state = self.state_dir
        shutil.rmtree(state.models, ignore_errors=True)
        render_repository(self.settings, state.models)
        write_atomically(state.config, self.settings.to_yaml())
        self._write_state()

    def _start_triton(self, config: TritonConfig) -> None:
        unit = self._supervisor.start(
            specs.triton_spec(config, self.state_dir.log(specs.TRITON)),
            triton_companion(config, self.settings, lambda: unit.reloaded()),
        )

    def _write_state(self) -> None:
        self.state_dir.write(self.state)


def triton_companion(
    config: TritonConfig, settings: Settings, on_reload: Callable[[], None]
) -> Companion:
    """Watches the models' processes of a run of Triton, and clears its shared memory away when it ends."""
    address = reachable(f"{config.host}:{config.port}")
    watch = StubWatch(address, config.secret, config.models, settings.triton.start_s, on_reload)
    remove_shared_memory(config.shm_prefix)  # a supervisor that was killed could not

    async def companion(child: Child) -> None:
        try:
            await watch(child)
            await asyncio.shield(child.exited)
        finally:
            remove_shared_memory(config.shm_prefix)

    return companion


@asynccontextmanager
async def running_mesh(settings: Settings, state_dir: Path | None = None) -> AsyncIterator[Mesh]:
    """A mesh that is ready when the block begins and gone when it ends.

    Without ``state_dir`` everything lies in a temporary folder, which is kept when the start fails, for its logs.
    Port 0 in ``gateway.address`` takes a free one.

    Raises:
        SetupError: something is missing, taken, broken or did not start; one line that says what to do.
        SettingsError: a model cannot be served.
    """
    with _state_root(state_dir) as root:
        state = StateDir(root)
        with state.lock():
            mesh = Mesh(make_plan(settings, state))
            try:
                await mesh.start()
                yield mesh
            finally:
                await mesh.stop()
                state.forget()


@contextmanager
def _state_root(named: Path | None) -> Iterator[Path]:
    """``named``, else a folder that is removed at the end, unless a start failed that wrote logs."""
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
