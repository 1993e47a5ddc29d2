"""Stops or reconfigures a running mesh from outside, by what its state directory says."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from sluice.defaults import DEFAULT_ADDRESS
from sluice.errors import SetupError
from sluice.settings import ModelSettings, Settings, SettingsError, load
from sluice.settings.reload import TAKEN_WHILE_RUNNING, outcome_in, refuse_changes
from supervisor.lifecycle import Phase
from supervisor.plan import GATEWAY, at_addresses, embedded_models, is_gateway, shm_prefix
from supervisor.serve import check_policies
from supervisor.state import MeshState, ProcessState, StateDir, write_atomically
from supervisor.triton import remove_shared_memory

STOP_MARGIN_S: Final = 5.0
"""What a supervisor may take to stop, on top of the bounds of its processes, seconds."""
RELOAD_S: Final = 30.0
"""How long a process may take to accept or reject the configuration, seconds."""
_KILLED_BOUND_S: Final = 10.0
_POLL_S: Final = 0.05
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


def stop_mesh(state: StateDir) -> Stopped:
    """Ends the supervisor of ``state`` and everything it started; returns when nothing is left.

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
        if _ended(descriptor, seen.stop_s + STOP_MARGIN_S):
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


@dataclass(frozen=True)
class Reloaded:
    """What `reload_mesh` did.

    Attributes:
        processes: names of those that took the configuration.
        changed: whether it differs from the one before; lists of words are read again in any case.
        seconds: how long it took.
    """

    processes: tuple[str, ...]
    changed: bool
    seconds: float


def reload_mesh(state: StateDir, config: Path | None) -> Reloaded:
    """Checks ``config``, writes it to the file that the processes read, and has them read it.

    Without ``config`` the present one is read again, with the lists that it names. All or nothing: when a process
    rejects it, the previous one is restored.

    Raises:
        SetupError: no mesh runs there, or a process does not answer.
        SettingsError: the configuration cannot work, or changes what cannot change while running.
    """
    begun = time.monotonic()
    running = _running(state)
    before = load(state.config)
    with _working_directory_of(running):
        read = load(config or state.config)
        check_policies(read, config or state.config)
        after = before if config is None else _carried(read, before)
    refuse_changes(before, after, _FIXED)
    old_text, new_text = state.config.read_text(encoding="utf-8"), after.to_yaml()
    write_atomically(state.config, new_text)
    try:
        for process in running:
            _reload(process)
    except (SetupError, SettingsError):
        write_atomically(state.config, old_text)
        for process in running:
            _send(process)
        raise
    names = tuple(process.name for process in running)
    return Reloaded(names, new_text != old_text, time.monotonic() - begun)


def _running(state: StateDir) -> list[ProcessState]:
    """The processes that reload on SIGHUP, of several gateways the first: it reloads the others too.

    One that waits for its restart reads the new file when it starts.
    """
    mesh = state.read()
    if mesh is None or not state.is_locked():
        raise SetupError(f"no mesh is running in {state.root}; start one with: sluice up --detach")
    by_kind: dict[str, ProcessState] = {}
    for process in mesh.processes:
        kind = GATEWAY if is_gateway(process.name) else process.name
        if process.phase == Phase.RUNNING and process.alive:
            by_kind.setdefault(kind, process)
    found = [process for kind, process in by_kind.items() if kind in TAKEN_WHILE_RUNNING]
    if not found:
        raise SetupError("no process that reloads its configuration runs now; see: sluice status")
    return found


def _carried(settings: Settings, running: Settings) -> Settings:
    """``settings`` with the addresses that were chosen when the mesh started, where the file leaves them open."""
    update: dict[str, object] = {}
    if settings.nats.url is None:
        update["nats"] = settings.nats.model_copy(
            update={"url": running.nats.url, "port": running.nats.port}
        )
    if running.tls.embedded:
        update["nats"] = running.nats
        update["tls"] = running.tls
    embedded = embedded_models(settings)
    update["models"] = tuple(
        _carried_model(model, running) if model in embedded else model for model in settings.models
    )
    if settings.gateway.address == DEFAULT_ADDRESS or settings.gateway.address.endswith(":0"):
        address = {"address": running.gateway.address}
        update["gateway"] = settings.gateway.model_copy(update=address)
    http = settings.http
    if "address" not in http.model_fields_set or (http.address or "").endswith(":0"):
        update["http"] = running.http
    if settings.jobs.replicas and settings.jobs.address.endswith(":0"):
        addresses = {"address": running.jobs.address, "gateways": running.jobs.gateways}
        update["jobs"] = settings.jobs.model_copy(update=addresses)
    asked = settings.telemetry.prometheus
    if any((page or "").endswith(":0") for page in (asked.gateway, asked.batcher, asked.jobs)):
        pages = {"prometheus": running.telemetry.prometheus}
        update["telemetry"] = settings.telemetry.model_copy(update=pages)
    return settings.model_copy(update=update)


def _carried_model(model: ModelSettings, running: Settings) -> ModelSettings:
    """``model`` at the addresses of its workers; as it is when it has none, or another number."""
    known = running.model(model.name)
    if known is None or len(known.triton_urls) != len(model.triton_models):
        return model
    return at_addresses(model, known.triton_urls)


@contextlib.contextmanager
def _working_directory_of(processes: list[ProcessState]) -> Iterator[None]:
    """Word lists are named relative to the folder in which the mesh was started."""
    assert processes[0].pid is not None
    with contextlib.chdir(psutil.Process(processes[0].pid).cwd()):
        yield


def _reload(process: ProcessState) -> None:
    """Returns when ``process`` has taken the configuration; raises SettingsError when it refused."""
    assert process.log is not None
    log = Path(process.log)
    start = log.stat().st_size
    _send(process)
    until = time.monotonic() + RELOAD_S
    while (said := outcome_in(_text_from(log, start))) is None:
        if not process.alive or time.monotonic() > until:
            raise SetupError(f"{process.name} did not answer; see its log {log}")
        time.sleep(_POLL_S)
    taken, why = said
    if not taken:
        raise SettingsError(f"{process.name}: {why}")


def _send(process: ProcessState) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGHUP)


def _text_from(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
