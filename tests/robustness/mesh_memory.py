"""Resident memory of the processes of a mesh."""

import psutil

from supervisor.mesh import Mesh
from supervisor.model_processes import stub_pids
from supervisor.plan import is_worker


def memory_of(mesh: Mesh) -> dict[str, float]:
    """KiB by process; the Python process of a model is the stub of its Triton."""
    pids = dict(mesh.supervisor.pids)
    for name, server in mesh.supervisor.pids.items():
        if is_worker(name):
            pids |= {f"{name}-stub": pid for pid in stub_pids(server).values()}
    return {name: psutil.Process(pid).memory_info().rss / 1024 for name, pid in pids.items()}
