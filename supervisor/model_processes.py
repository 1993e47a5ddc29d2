"""Watches the Python processes of Triton's models, because Triton does not.

A stub that dies leaves its model "ready", its streams hanging, and nothing in the log. Each stub is watched through a
pidfd, so its end is known at once. The server is killed then, which ends its streams, and started again with its
models: that takes 0.1 s longer than loading the model into the same server, and a stub that is killed can take the
server along in any case. So workers that are to survive each other run in servers of their own.

A server or stub that was stopped (SIGSTOP) is killed, too: its rows continue elsewhere, and Triton refuses a stub that
did not answer for a second for good. A debugger's stop is another state and does not count.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import psutil

from supervisor.child import Child
from supervisor.supervisor import Watcher
from supervisor.triton import STUB, TritonConfig, remove_shared_memory, wait_for_triton

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""Interval at which the states of the processes are read, in seconds, by all watchers at the same moments. A process
that is stopped at two readings in succession counts as lost."""


async def until_lost(server: Child, config: TritonConfig, start_s: float) -> None:
    """Wait until a model's process of `server` has ended, or until it or the server is suspended.

    The server may take `start_s` seconds to start. Return at once if a model has no process then.

    Raises:
        TimeoutError: it did not start in time.
    """
    await wait_for_triton(config.address, start_s, config.tls)
    stubs = stub_pids(server.pid)
    if stubs.keys() >= {f"{model}_0_0" for model in config.models}:
        await first_lost([server.pid, *stubs.values()])


def stub_pids(server_pid: int) -> dict[str, int]:
    """Return the processes that run Python models by model instance ("NAME_0_0"), without dead ones.

    Empty when the server is gone. Nothing else shows that a stub has died: server and model stay "ready".
    """
    try:
        children = psutil.Process(server_pid).children()
        return dict(pair for child in children if (pair := _instance(child)))
    except psutil.NoSuchProcess:
        return {}


def _instance(child: psutil.Process) -> tuple[str, int] | None:
    """Return the model instance that a stub serves; None for what is no stub or has ended."""
    try:
        argv = child.cmdline()
        if child.status() == psutil.STATUS_ZOMBIE or not argv or Path(argv[0]).name != STUB:
            return None
    except psutil.NoSuchProcess:
        return None
    # PROGRAM MODEL_FILE REGION SIZE GROWTH SERVER_PID BACKEND_FOLDER OFFSET INSTANCE RUNTIME
    return (argv[8], child.pid) if len(argv) > 8 else None


async def first_lost(pids: Collection[int]) -> None:
    """Wait until one of the processes has ended or is suspended; they need not be our children."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with ExitStack() as watched, suppress(ProcessLookupError, psutil.NoSuchProcess):
        for pid in pids:
            descriptor = os.pidfd_open(pid)
            watched.callback(os.close, descriptor)
            loop.add_reader(descriptor, ended.set)
            watched.callback(loop.remove_reader, descriptor)
        processes, before = [psutil.Process(pid) for pid in pids], set[int]()
        while not ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout_at((loop.time() // LOOK_S + 1) * LOOK_S):
                    await ended.wait()
            stopped = {one.pid for one in processes if one.status() == psutil.STATUS_STOPPED}
            if stopped & before:
                return
            before = stopped


async def kill_when_stopped(child: Child) -> None:
    """Wait until a process is suspended (SIGSTOP) and kill it: a new one is there before somebody lets it go on."""
    await first_lost([child.pid])
    if child.alive and not child.ending:
        logger.warning("process %d is suspended (SIGSTOP), killing it", child.pid)
        child.send(signal.SIGKILL)


def triton_watcher(config: TritonConfig, start_s: float) -> Watcher:
    """Return a watcher that kills a server when a process of it is lost, and removes its shared memory when it ends.

    What a former server of that prefix left in shared memory is removed at once.
    """
    remove_shared_memory(config.shm_prefix)  # a supervisor that was killed could not

    async def watcher(child: Child) -> None:
        try:
            await until_lost(child, config, start_s)
            if not child.ending:
                logger.warning(
                    "restarting %s: its model process ended or is suspended", config.name
                )
                child.send(signal.SIGKILL)
            await asyncio.shield(child.exited)
        finally:
            remove_shared_memory(config.shm_prefix)

    return watcher
