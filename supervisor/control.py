"""Stops or reconfigures a running mesh from outside, by what its state directory says."""

import time
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from sluice.defaults import DEFAULT_ADDRESS
from sluice.errors import SetupError
from sluice.settings import Settings, load
from sluice.settings.reload import TAKEN_WHILE_RUNNING, refuse_changes
from supervisor.check import load_with_policies
from supervisor.child import expect_end, has_ended
from supervisor.control_socket import ask
from supervisor.mesh import end_leftovers
from supervisor.plan import changed, shm_prefix
from supervisor.reload import RELOAD_S, Reloaded
from supervisor.serve import settings_of
from supervisor.state import MeshState, StateDir
from supervisor.triton import remove_shared_memory

STOP_MARGIN_S: Final = 5.0
"""What a supervisor may take to stop, on top of the bounds of its processes, seconds."""
WAIT_REPORTED_S: Final = 1.0
"""How long a stop is silent about what it waits for, seconds."""
OnWait = Callable[[Sequence[str], float], None]
"""Takes the names of the processes that a stop waits for, and how long it still may, seconds."""
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
        SetupError: a process does not end, or the supervisor belongs to another user or has no state yet.
    """
    begun, seen = time.monotonic(), state.read()
    pid, killed = None, False
    if state.is_locked():
        if seen is None:
            raise SetupError(
                f"a supervisor holds {state.root} but has not written its state yet; try again"
            )
        pid = seen.pid
        try:
            killed = _end_supervisor(state, seen, on_wait)
        except psutil.AccessDenied:
            raise SetupError(f"the supervisor (pid {pid}) belongs to another user") from None
    last = state.read() or seen
    leftovers = end_leftovers(last)
    remove_shared_memory(shm_prefix(state.root))
    state.forget()
    return Stopped(pid, killed, leftovers, time.monotonic() - begun)


def _end_supervisor(state: StateDir, seen: MeshState, on_wait: OnWait) -> bool:
    """Send SIGTERM, then SIGKILL, which takes its processes down; return whether SIGKILL was needed."""
    try:
        supervisor = psutil.Process(seen.pid)
        supervisor.terminate()
        if await_end(seen.pid, seen.stop_s + STOP_MARGIN_S, state, on_wait):
            return False
        supervisor.kill()
        expect_end(seen.pid, "the supervisor")
        return True
    except psutil.NoSuchProcess:
        return False


def await_end(
    pid: int,
    bound_s: float,
    state: StateDir,
    on_wait: OnWait,
    silent_s: float = WAIT_REPORTED_S,
) -> bool:
    """Wait for the end of the supervisor, and return whether it ended in time.

    After `silent_s` seconds it calls `on_wait` whenever the processes that still run are others.
    """
    until, reported = time.monotonic() + bound_s, tuple[str, ...]()
    while (left_s := until - time.monotonic()) > 0:
        if has_ended(pid, min(silent_s, left_s)):
            return True
        mesh = state.read()
        processes = () if mesh is None else mesh.processes
        names = tuple(process.name for process in processes if process.pid is not None)
        if names and names != reported:
            on_wait(names, until - time.monotonic())
            reported = names
    return False


def reload_mesh(state: StateDir, config: Path | None) -> Reloaded:
    """Check `config` and have the supervisor put it into force, all or nothing.

    Without `config` the file that `sluice up` was given is read again, without one there the present configuration;
    word lists and model folders that it names in any case. Changes the working directory of
    this process meanwhile.

    Raises:
        SetupError: no mesh runs there, a model cannot be loaded, or a process does not answer.
        SettingsError: the configuration cannot work, or changes what cannot change while running.
    """
    seen = state.read()
    if seen is None or not state.is_locked() or not seen.ready:
        raise SetupError(f"no mesh is running in {state.root}; start one with: sluice up --detach")
    before = load(state.config)
    file = seen.origin.config if config is None else str(config)
    # Files are named relative to the folder in which the mesh was started.
    with chdir(psutil.Process(seen.pid).cwd()):
        if file is None:
            read, new_settings = load_with_policies(state.config), None
        else:
            read = settings_of(replace(seen.origin, config=file), before.http.address)
            new_settings = carried(read, before)
            refuse_changes(before, new_settings, _FIXED)
    command = {"settings": new_settings and new_settings.model_dump(mode="json"), "config": file}
    bound_s = before.triton.start_s * max(1, len(read.models)) + 4 * RELOAD_S
    answer = ask(state.root, command, bound_s)
    return Reloaded(**{**answer, "processes": tuple(answer["processes"])})


def carried(settings: Settings, running: Settings) -> Settings:
    """Return `settings` with the addresses that were chosen at start, where the file leaves them open."""
    nats, http, jobs = running.nats, settings.http, running.jobs
    pages = settings.telemetry.prometheus.values()
    if settings.nats.url is None:
        nats_fields = {"url": nats.url, "port": nats.port, "encryption_key": None}
        settings = changed(settings, nats=nats_fields)
    if running.tls.embedded:
        settings = settings.model_copy(update={"nats": nats, "tls": running.tls})
    if settings.gateway.address == DEFAULT_ADDRESS or _is_open(settings.gateway.address):
        settings = changed(settings, gateway={"address": running.gateway.address})
    if "address" not in http.model_fields_set or _is_open(http.address):
        settings = settings.model_copy(update={"http": running.http})
    if settings.jobs.replicas and _is_open(settings.jobs.address):
        settings = changed(settings, jobs={"address": jobs.address, "gateways": jobs.gateways})
    if not pages or any(map(_is_open, pages)):  # those of `sluice up --metrics` are in no file
        settings = changed(settings, telemetry={"prometheus": running.telemetry.prometheus})
    return settings


def _is_open(address: str | None) -> bool:
    """Return whether an address leaves the port to the start."""
    return address is not None and address.endswith(":0")
