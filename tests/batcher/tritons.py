"""A Triton that a test may kill and start again on the same port."""

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from model_workers.deploy import render_repository
from sluice.settings import ModelSettings, Settings
from sluice.settings.routing import RoutingSettings
from sluice.startup import free_port
from supervisor import triton, triton_stubs
from supervisor.triton_stubs import Action, control_model

START_S = 60.0
SECRET = "test"


class MortalTriton:
    """One server after the other, in ``folder``."""

    def __init__(self, folder: Path, model: ModelSettings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        settings = Settings(models=(model,), routing=RoutingSettings(default=model.name))
        render_repository(settings, folder / "repository")
        triton.prepare_runtime(folder / "runtime")
        self._models = model.triton_models
        self._log = folder / "triton.log"
        self._config = triton.TritonConfig(
            repository=folder / "repository",
            models=model.triton_models,
            runtime=folder / "runtime",
            port=free_port(),
            secret=SECRET,
            shm_prefix=f"sluice_test_{os.getpid()}_{folder.name[-20:]}_",
        )
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    @asynccontextmanager
    async def running(folder: Path, model: ModelSettings) -> AsyncIterator["MortalTriton"]:
        """A server that is ready; whatever runs at the end is killed."""
        server = MortalTriton(folder, model)
        try:
            await server.start()
            yield server
        finally:
            server.kill()

    @property
    def address(self) -> str:
        """Where it listens, now and after a restart."""
        return f"{self._config.host}:{self._config.port}"

    async def start(self) -> None:
        """Starts a server and waits until it is ready."""
        self._process = self._spawn()
        await triton.wait_for_triton(self.address, START_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                triton.triton_command(self._config),
                env=triton.triton_environment(self._config.runtime),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL for the server and its stubs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        triton.remove_shared_memory(self._config.shm_prefix)

    def kill_stub(self, worker: int = 0) -> None:
        """SIGKILL for the Python process of a worker; the server does not notice."""
        assert self._process is not None
        stubs = triton_stubs.stub_pids(self._process.pid)
        os.kill(stubs[f"{self._models[worker]}_0_0"], signal.SIGKILL)

    async def reload(self, worker: int = 0) -> None:
        """Starts the Python process of a worker again, as the supervisor does."""
        for action in (Action.UNLOAD, Action.LOAD):
            name = self._models[worker]
            assert not await control_model(self.address, SECRET, name, action, START_S)
