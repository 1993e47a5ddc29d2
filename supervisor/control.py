"""Stops or reconfigures a running mesh from outside, by what its state directory says."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from sluice.defaults import DEFAULT_ADDRESS
from sluice.errors import SetupError
from sluice.settings import Settings, SettingsError, load
from sluice.settings.reload import TAKEN_WHILE_RUNNING, refuse_changes
from supervisor.check import load_with_policies
from supervisor.control_socket import ask
from supervisor.plan import changed, shm_prefix
from supervisor.reload import RELOAD_S, Reloaded
from supervisor.serve import settings_of
from supervisor.state import MeshState, StateDir
from supervisor.triton import remove_shared_memory

STOP_MARGIN_S: Final = 5.0
"""What a supervisor may take to stop, on top of the bounds of its processes, seconds."""
WAIT_TOLD_S: Final = 1.0
"""How long a stop is silent about what it waits for, seconds."""
OnWait = Callable[[Sequence[str], float], None]
"""Takes the names of the processes that a stop waits for, and how long it still may, seconds."""
_KILLED_BOUND_S: Final = 10.0
_TAKEN: Final = frozenset[str]().union(*TAKEN_WHILE_RUNNING.values())
_FIXED: Final = [name for name in Settings.model_fields if name not in _TAKEN]


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


def stop_mesh(state: StateDir, on_wait: OnWait = lambda _names, _left_s: None) -> Stopped:
    """End the supervisor of `state` and everything it started; return when nothing is left.

    `on_wait` is told each time that other processes are waited for.

    Raises:
        SetupError: a process does not end, or the supervisor belongs to another user.
    """
    begun = time.monotonic()
    seen = state.read()
    locked = state.is_locked()
    if locked and seen is None:
        raise SetupError(
            f"a supervisor holds {state.root} but has not written its state yet; try again"
        )
    killed = False
    if locked and seen is not None:
        killed = _end_supervisor(state, seen, on_wait)
    last = state.read() or seen
    leftovers = _kill_leftovers(last) if last is not None else 0
    remove_shared_memory(shm_prefix(state.root))
    state.forget()
    pid = seen.pid if locked and seen is not None else None
    return Stopped(pid, killed, leftovers, time.monotonic() - begun)


def _end_supervisor(state: StateDir, seen: MeshState, on_wait: OnWait) -> bool:
    """Send SIGTERM, then SIGKILL, which takes its processes down; return whether SIGKILL was needed."""
    try:
        descriptor = os.pidfd_open(seen.pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if await_end(descriptor, seen.stop_s + STOP_MARGIN_S, state, on_wait):
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


def await_end(
    descriptor: int,
    bound_s: float,
    state: StateDir,
    on_wait: OnWait,
    silent_s: float = WAIT_TOLD_S,
) -> bool:
    """Wait for the end of the supervisor; report which of its processes it waits for after `silent_s`."""
    until, reported = time.monotonic() + bound_s, tuple[str, ...]()
    while (left_s := until - time.monotonic()) > 0:
        if _ended(descriptor, min(silent_s, left_s)):
            return True
        mesh = state.read()
        names = (
            tuple(process.name for process in mesh.processes if process.pid is not None)
            if mesh
            else ()
        )
        if names and names != reported:
            on_wait(names, until - time.monotonic())
            reported = names
    return False


def _kill_leftovers(last: MeshState) -> int:
    """Kill recorded processes that are still alive, with their groups, and wait for their end."""
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
    """Return whether the process ended in time."""
    return bool(select.select([descriptor], [], [], bound_s)[0])


def reload_mesh(state: StateDir, config: Path | None) -> Reloaded:
    """Check `config` and have the supervisor put it into force, all or nothing.

    Without `config` the file that `sluice up` was given is read again, without one there the present configuration;
    word lists and model folders that it names in any case.

    Raises:
        SetupError: no mesh runs there, a model cannot be loaded, or a process does not answer.
        SettingsError: the configuration cannot work, or changes what cannot change while running.
    """
    seen = state.read()
    if seen is None or not state.is_locked() or not seen.ready:
        raise SetupError(f"no mesh is running in {state.root}; start one with: sluice up --detach")
    before = load(state.config)
    file = seen.origin.config if config is None else str(config)
    with _working_directory_of(seen.pid):
        if file is None:
            read, asked = load_with_policies(state.config), None
        else:
            read = settings_of(replace(seen.origin, config=file), before.http.address)
            asked = _carried(read, before)
            refuse_changes(before, asked, _FIXED)
    command = {"settings": asked and asked.model_dump(mode="json"), "config": file}
    bound_s = before.triton.start_s * max(1, len(read.models)) + 4 * RELOAD_S
    answer = ask(state.root, command, bound_s)
    if "settings_error" in answer:
        raise SettingsError(answer["settings_error"])
    if "error" in answer:
        raise SetupError(answer["error"])
    return Reloaded(**{**answer, "processes": tuple(answer["processes"])})


def _carried(settings: Settings, running: Settings) -> Settings:
    """Return `settings` with the addresses that were chosen at start, where the file leaves them open."""
    nats, http, jobs, pages = (
        running.nats,
        settings.http,
        running.jobs,
        settings.telemetry.prometheus,
    )
    if settings.nats.url is None:
        settings = changed(
            settings, nats={"url": nats.url, "port": nats.port, "encryption_key": None}
        )
    if running.tls.embedded:
        settings = settings.model_copy(update={"nats": nats, "tls": running.tls})
    if settings.gateway.address == DEFAULT_ADDRESS or settings.gateway.address.endswith(":0"):
        settings = changed(settings, gateway={"address": running.gateway.address})
    if "address" not in http.model_fields_set or (http.address or "").endswith(":0"):
        settings = settings.model_copy(update={"http": running.http})
    if settings.jobs.replicas and settings.jobs.address.endswith(":0"):
        settings = changed(settings, jobs={"address": jobs.address, "gateways": jobs.gateways})
    taken = any((page or "").endswith(":0") for page in pages.values())
    if taken or not pages:  # those of `sluice up --metrics` are in no file
        settings = changed(settings, telemetry={"prometheus": running.telemetry.prometheus})
    return settings


@contextlib.contextmanager
def _working_directory_of(pid: int) -> Iterator[None]:
    """Files are named relative to the folder in which the mesh was started."""
    with contextlib.chdir(psutil.Process(pid).cwd()):
        yield
