"""The state directory: what a supervisor writes for `sluice status`, `sluice down` and a second `sluice up`.

| file | what |
|---|---|
| `lock` | held (flock) by the supervisor as long as it runs |
| `state.json` | `MeshState`, replaced at every change |
| `prometheus.json` | where the processes have their metrics, for `file_sd_configs` of Prometheus |
| `resume.key` | the key of resume tokens, made once; survives `down` |
| `mesh.key` | what processes of the mesh show each other, made once |
| `config.yaml` | the settings with all addresses resolved; batcher, gateways, jobs and remote workers read it |
| `nats.conf` | the configuration of nats-server, with the passwords of the processes |
| `triton/` | the runtime folder of Triton (`supervisor.triton`) |
| `models/` | the Triton model repository, rendered at start |
| `versions/` | those of models that were added or replaced since |
| `control.sock` | where the supervisor takes `sluice reload` |
| `nats/` | JetStream's store; survives `down` |
| `tls/` | the authority and certificates of a secured mesh (`supervisor.certificates`); survives `down` |
| `logs/NAME.log` | output of each process |
"""

import json
import os
import secrets
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import psutil
from pydantic import TypeAdapter

from sluice.errors import SetupError
from sluice.local_mesh import (
    LOCK,
    MESH_KEY,
    STATE,
    STATE_DIR_VARIABLE,
    is_locked,
    state_root,
    try_lock,
)


@dataclass(frozen=True)
class ProcessState:
    """One process of the mesh, as its supervisor saw it last.

    Attributes:
        pid: None while it waits for its restart.
        started_unix_ms: of the present run.
        restarts: how often it was started again.
        port: where it listens, if anywhere.
        log: its log file.
        page: host and port of its metrics for Prometheus, if it has any.
    """

    name: str
    pid: int | None
    started_unix_ms: int | None
    restarts: int
    port: int | None
    log: str | None
    page: str | None = None

    @property
    def alive(self) -> bool:
        """Whether the recorded process exists now; a later process with the same number does not count."""
        return self.pid is not None and is_same_process(self.pid, self.started_unix_ms)


@dataclass(frozen=True)
class Origin:
    """What `sluice up` was given.

    Attributes:
        config: the file, an absolute path; None: the defaults.
        address: of the gateway, instead of what the file says.
        http: the same of HTTP; "off": none.
        secure: whether everything is encrypted.
        metrics: whether pages for Prometheus that the file leaves out are on free ports.
    """

    config: str | None = None
    address: str | None = None
    http: str | None = None
    secure: bool = False
    metrics: bool = False

    @property
    def file(self) -> Path | None:
        """Path of the configuration; None: the defaults."""
        return None if self.config is None else Path(self.config)


DEFAULTS: Final = Origin()
"""Where the settings of a mesh come from that was given nothing."""


@dataclass(frozen=True)
class MeshState:
    """A mesh, as its supervisor saw it last.

    Attributes:
        pid: of the supervisor.
        started_unix_ms: when the supervisor began.
        ready: whether the start is complete.
        stop_s: how long a stop may take, seconds.
        address: of the gateway, or of several with commas between them.
        ca: file with the authorities of its certificate; None: it is not encrypted.
        processes: in the order of their start.
        http: where HTTP is served, like `address`; None: nowhere.
        origin: what it was started with; after a reload with its file.
    """

    pid: int
    started_unix_ms: int
    ready: bool
    stop_s: float
    address: str
    ca: str | None
    nats_url: str
    processes: tuple[ProcessState, ...]
    http: str | None = None
    origin: Origin = DEFAULTS

    def targets_json(self) -> str:
        """Return the pages of all processes as Prometheus reads them from a file; empty without any."""
        groups = [
            {"targets": [process.page], "labels": {"process": process.name}}
            for process in self.processes
            if process.page is not None
        ]
        return json.dumps(groups, indent=2) if groups else ""


_JSON: Final = TypeAdapter(MeshState)


class StateDir:
    """Paths of one state directory, and its lock."""

    def __init__(self, named: Path | None) -> None:
        """Use the directory that `state_root` finds; raise as that does."""
        self.root = state_root(named)
        self.config = self.root / "config.yaml"
        self.models = self.root / "models"
        self.versions = self.root / "versions"
        self.nats = self.root / "nats"
        self.tls = self.root / "tls"
        self.logs = self.root / "logs"
        self._lock = self.root / LOCK
        self.targets = self.root / "prometheus.json"
        self._state = self.root / STATE

    def log(self, name: str) -> Path:
        """Return the log file of process `name`."""
        return self.logs / f"{name}.log"

    def create(self) -> None:
        """Make the folders, for this user alone.

        Raises:
            SetupError: the place cannot be written, or others could replace what is in it.
        """
        self._check_name()
        try:
            for folder in (self.root, self.logs, self.nats):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SetupError(
                f"state directory {self.root} cannot be made: {error.strerror}; "
                f"name another one with --state-dir or {STATE_DIR_VARIABLE}"
            ) from error
        self._check_owner()

    def _check_name(self) -> None:
        """Raise SetupError for a path that configuration files cannot hold."""
        text = str(self.root)
        if not text.isprintable():  # nor are bytes that are no UTF-8
            raise SetupError(
                f"state directory: {text!r} has control characters or is not UTF-8; "
                f"name another one with --state-dir or {STATE_DIR_VARIABLE}"
            )

    def _check_owner(self) -> None:
        """Raise SetupError when another user could replace files, some of which are run."""
        status = self.root.stat()
        if status.st_uid != os.geteuid():
            raise SetupError(
                f"state directory: {self.root} belongs to another user (uid {status.st_uid}), who could replace what "
                "runs there; name one of your own with --state-dir"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SetupError(
                f"state directory: {self.root} can be written by other users (mode {status.st_mode & 0o7777:o}); "
                f"run: chmod go-w {shlex.quote(str(self.root))}"
            )

    def lock(self) -> BinaryIO:
        """Lock the directory for a supervisor until the result is closed.

        Raises:
            SetupError: another supervisor has it, or the place cannot be written.
        """
        self.create()
        lock = try_lock(self._lock)
        if lock is None:
            raise self.lock_error()
        return lock

    def is_locked(self) -> bool:
        """Tell whether a supervisor runs."""
        return is_locked(self.root)

    def lock_error(self) -> SetupError:
        """Return the error of a second `up`."""
        state = self.read()
        who = f" (pid {state.pid}, {state.address})" if state else ""
        return SetupError(
            f"a mesh is running in {self.root}{who}; stop it with: sluice down --state-dir {self.root}"
        )

    def read(self) -> MeshState | None:
        """Return the last state, or None if there is none that can be read."""
        try:
            return _JSON.validate_json(self._state.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, state: MeshState) -> None:
        """Replace the state in one step: a reader sees either the old or the new one."""
        write_atomically(self._state, _JSON.dump_json(state, indent=2).decode())
        if targets := state.targets_json():
            write_atomically(self.targets, targets)

    def resume_key(self) -> str:
        """Return the key of resume tokens; make it if there is none."""
        return self._secret("resume.key")

    def mesh_key(self, configured: str | None = None) -> str:
        """Return what processes of the mesh show each other, and commands of this user too.

        Made if there is none; `configured` replaces it.
        """
        return self._secret(MESH_KEY, configured)

    def _secret(self, name: str, configured: str | None = None) -> str:
        path = self.root / name
        if configured is not None or not path.exists():
            write_atomically(path, configured or secrets.token_hex())
        return path.read_text(encoding="utf-8")

    def forget(self) -> None:
        """Remove the state: nothing runs any more."""
        self._state.unlink(missing_ok=True)
        self.targets.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file `path` by `text` in one step, for this user alone."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def is_same_process(pid: int, started_unix_ms: int | None) -> bool:
    """Return whether `pid` is alive and started at about `started_unix_ms` (None: at any time)."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # The kernel counts from boot in ticks of 10 ms, and the wall clock may have been set since.
        return (
            started_unix_ms is None or abs(process.create_time() * 1000 - started_unix_ms) < 5_000
        )
    except psutil.Error:
        return False
