"""Watches the Python processes of Triton's models, because Triton does not.

A stub that dies leaves its model "ready", its streams hanging, and nothing in the log. Each stub is watched through a
pidfd, so its end is known at once and watching costs nothing. Loading the model again through the repository API starts
a new stub, in a third of a second plus the model's own start. Other models keep their rows and streams, which a restart
of the server would end. Requests to the dead stub hang until their clients give up.
"""

import asyncio
import enum
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import psutil

from supervisor.child import Child
from supervisor.lifecycle import Lifecycle
from supervisor.triton import STUB, restricted_metadata, wait_for_triton

logger = logging.getLogger(__name__)

RELOADS_MAX: Final = 5
"""Failed loads of one model in a row, after which the server itself is restarted."""


class Action(enum.Enum):
    """What `control_model` asks for."""

    LOAD = "load"
    UNLOAD = "unload"


class StubWatch:
    """The `Watcher` of a server's process: reloads the models whose stubs have died."""

    def __init__(self, address: str, secret: str, models: Sequence[str], start_s: float) -> None:
        """Watches ``models`` of the server at ``address``; its start and each load may take ``start_s`` seconds."""
        self._address = address
        self._secret = secret
        self._models = tuple(models)
        self._start_s = start_s

    async def __call__(self, server: Child, on_reload: Callable[[], None]) -> None:
        """Runs until the server is asked to end, or has ended.

        Raises:
            TimeoutError: the server did not start in time.
            ReloadFailed: a model cannot be loaded again in this server.
        """
        await wait_for_triton(self._address, self._start_s)
        lifecycles = {model: Lifecycle() for model in self._models}
        for lifecycle in lifecycles.values():
            lifecycle.started(time.monotonic())
        while True:
            stubs = stub_pids(server.pid)
            if server.ending or not server.alive:
                return
            dead = [model for model in self._models if f"{model}_0_0" not in stubs]
            for model in dead:
                await self._reload(model, lifecycles[model])
                on_reload()
            if not dead:
                await first_end(stubs.values())

    async def _reload(self, model: str, life: Lifecycle) -> None:
        for _ in range(RELOADS_MAX):
            wait_s = life.exited(time.monotonic())
            logger.warning(
                "the Python process of model %s ended; loading it again in %.1f s", model, wait_s
            )
            # Unloaded first: Triton crashes when it answers a cancelled request for a dead stub, and ignores a load of
            # a model that is loaded already. Until the load, it refuses requests.
            problem = await self._control(model, Action.UNLOAD)
            await asyncio.sleep(wait_s)
            problem = problem or await self._control(model, Action.LOAD)
            if problem is None:
                life.started(time.monotonic())
                return
            logger.error("model %s was not loaded: %s", model, problem)
        raise ReloadFailed(f"model {model} was not loaded {RELOADS_MAX} times in a row")

    async def _control(self, model: str, action: Action) -> str | None:
        return await control_model(self._address, self._secret, model, action, self._start_s)


def stub_pids(server_pid: int) -> dict[str, int]:
    """Processes that run Python models, by model instance ("NAME_0_0"); a dead one is not among them.

    Empty when the server is gone. Nothing else shows that a stub has died: server and model stay "ready".
    """
    try:
        children = psutil.Process(server_pid).children()
        return dict(pair for child in children if (pair := _instance(child)))
    except psutil.NoSuchProcess:
        return {}


def _instance(child: psutil.Process) -> tuple[str, int] | None:
    """The model instance a stub serves; None for what is no stub or has ended."""
    try:
        argv = child.cmdline()
        if child.status() == psutil.STATUS_ZOMBIE or not argv or Path(argv[0]).name != STUB:
            return None
    except psutil.NoSuchProcess:
        return None
    # PROGRAM MODEL_FILE REGION SIZE GROWTH SERVER_PID BACKEND_FOLDER OFFSET INSTANCE RUNTIME
    return (argv[8], child.pid) if len(argv) > 8 else None


class ReloadFailed(Exception):
    """A model of a running server could not be loaded again."""


async def control_model(
    address: str, secret: str, model: str, action: Action, bound_s: float
) -> str | None:
    """Has the server at ``address`` load or unload ``model``; returns why it did not."""
    # Imported here: it takes half a second, and most meshes never need it.
    from tritonclient.grpc.aio import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    async with InferenceServerClient(address) as client:
        act = client.load_model if action is Action.LOAD else client.unload_model
        try:
            await asyncio.wait_for(act(model, headers=dict(restricted_metadata(secret))), bound_s)
        except InferenceServerException as error:
            return " ".join(str(error.message()).split())
        except TimeoutError:
            return f"no answer in {bound_s:.0f} s"
    return None


async def first_end(pids: Iterable[int]) -> None:
    """Returns when one of the processes has ended; they need not be our children."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptors: list[int] = []
    try:
        for pid in pids:
            descriptors.append(os.pidfd_open(pid))
            loop.add_reader(descriptors[-1], ended.set)
        await ended.wait()
    except ProcessLookupError:
        return
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
            os.close(descriptor)
