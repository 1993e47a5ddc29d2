"""Resident memory of the processes of a mesh."""

import asyncio
from collections import Counter
from contextlib import suppress

import psutil

from supervisor.mesh import Mesh
from supervisor.model_processes import stub_pids
from supervisor.plan import is_worker


def memory_of(mesh: Mesh, *, private: bool = False) -> dict[str, float]:
    """KiB by process; the Python process of a model is the stub of its Triton. ``private``: only pages of its own."""
    pids = dict(mesh.supervisor.pids)
    for name, server in mesh.supervisor.pids.items():
        if is_worker(name):
            pids |= {f"{name}-stub": pid for pid in stub_pids(server).values()}
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    if private:
        return {name: one.memory_full_info().uss / 1024 for name, one in processes.items()}
    return {name: one.memory_info().rss / 1024 for name, one in processes.items()}


async def watch_memory(mesh: Mesh, highest: Counter[str], every_s: float) -> None:
    """Keep the highest memory of each process in MiB, until cancelled."""
    while True:
        with suppress(psutil.Error, ProcessLookupError):  # a process that is started again
            highest |= Counter({name: int(kib) >> 10 for name, kib in memory_of(mesh).items()})
        await asyncio.sleep(every_s)
