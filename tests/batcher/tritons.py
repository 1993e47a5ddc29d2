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
from supervisor import model_processes, triton
from tests.support.triton import ready


class MortalTriton:
    """One server after the other, in ``folder``."""

    def __init__(self, folder: Path, model: ModelSettings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        settings = Settings(models=(model,), routing=RoutingSettings(default=model.name))
        render_repository(settings, folder / "repository")
        triton.prepare_runtime(folder / "runtime")
        self._log = folder / "triton.log"
        self._config = triton.TritonConfig(
            name="triton",
            repository=folder / "repository",
            models=(model.name,),
            runtime=folder / "runtime",
            port=free_port(),
            secret="test",
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

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Starts a server and waits until it is ready.

        On a busy machine Triton 2.51 sometimes ends at start (``boost::interprocess::lock_exception`` between server
        and stub): as from the supervisor, it gets a second try.
        """
        try:
            await self._start()
        except AssertionError:
            self.kill()
            await self._start()

    async def _start(self) -> None:
        self._process = self._spawn()
        await ready(self._process, self.address, self._log)

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

    def signal_stub(self, number: signal.Signals) -> None:
        """Sends a signal to the Python process; the server does not notice."""
        assert self._process is not None
        (stub,) = model_processes.stub_pids(self._process.pid).values()
        os.kill(stub, number)

    async def restart(self) -> None:
        """What the supervisor does when the model's process has ended."""
        self.kill()
        await self.start()
