"""Ends a mesh from outside, by what its state directory says."""

import os
import select
import signal
import time
from dataclasses import dataclass
from typing import Final

from sluice.errors import SetupError
from supervisor.plan import shm_prefix
from supervisor.state import MeshState, StateDir
from supervisor.triton import remove_shared_memory

MARGIN_S: Final = 5.0
"""What a supervisor may take beside the bounds of its processes, seconds."""

_KILLED_BOUND_S: Final = 10.0


@dataclass(frozen=True)
class Stopped:
    """What `stop_mesh` did.

    Attributes:
        pid: of the supervisor; None when none ran.
        killed: whether it had to be killed.
        leftovers: processes of a dead supervisor that were still there and were killed.
        seconds: how long it took.
    """

    pid: int | None
    killed: bool
    leftovers: int
    seconds: float


def stop_mesh(state: StateDir) -> Stopped:
    """Ends the supervisor of ``state`` and everything it started; returns when nothing is left.

    Raises:
        SetupError: something is left all the same, or the supervisor belongs to somebody else.
    """
    begun = time.monotonic()
    seen = state.read()
    locked = state.is_locked()
    if locked and seen is None:
        raise SetupError(f"a supervisor holds {state.root} but has not said who it is; try again")
    killed = False
    if locked and seen is not None:
        killed = _end_supervisor(seen)
    last = state.read() or seen
    leftovers = _kill_leftovers(last) if last is not None else 0
    remove_shared_memory(shm_prefix(state.root))
    state.forget()
    pid = seen.pid if locked and seen is not None else None
    return Stopped(pid, killed, leftovers, time.monotonic() - begun)


def _end_supervisor(seen: MeshState) -> bool:
    """SIGTERM, then SIGKILL, which its processes do not survive; returns whether it took the second."""
    try:
        descriptor = os.pidfd_open(seen.pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if _ended(descriptor, seen.stop_s + MARGIN_S):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not _ended(descriptor, _KILLED_BOUND_S):
            raise SetupError(f"the supervisor (pid {seen.pid}) does not end, not even by SIGKILL")
        return True
    except ProcessLookupError:
        return False
    except PermissionError:
        raise SetupError(f"the supervisor (pid {seen.pid}) belongs to another user") from None
    finally:
        os.close(descriptor)


def _kill_leftovers(last: MeshState) -> int:
    """Kills recorded processes that still live, with their groups; waits for their end."""
    killed = 0
    for process in last.processes:
        if process.pid is None or not process.alive:
            continue
        descriptor = os.pidfd_open(process.pid)
        try:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
            if not _ended(descriptor, _KILLED_BOUND_S):
                raise SetupError(f"{process.name} (pid {process.pid}) does not end")
        finally:
            os.close(descriptor)
    return killed


def _ended(descriptor: int, bound_s: float) -> bool:
    """Whether the process ended within the bound."""
    return bool(select.select([descriptor], [], [], bound_s)[0])
