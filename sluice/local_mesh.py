"""Find the mesh that `sluice up` runs on this machine.

A supervisor locks its state directory and writes there where its mesh can be reached; `supervisor.state` has the rest
of that directory. Commands read it to find the mesh without an address. Nothing is imported that a client alone lacks.
"""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from sluice.errors import SetupError

STATE_DIR_VARIABLE: Final = "SLUICE_STATE_DIR"
DEFAULT_STATE_DIR: Final = "~/.local/state/sluice"
LOCK: Final = "lock"
STATE: Final = "state.json"
MESH_KEY: Final = "mesh.key"


@dataclass(frozen=True)
class LocalMesh:
    """A mesh whose supervisor runs now.

    Attributes:
        root: its state directory.
        pid: of the supervisor.
        address: of the gateway, or of several with commas between them.
        ca: file with the authorities of its certificate; None: calls are not encrypted.
        api_key: a credential that the owner of the state directory may use; None: there is none.
    """

    root: Path
    pid: int
    address: str
    ca: str | None
    api_key: str | None


def state_root(named: Path | None = None) -> Path:
    """Return the state directory: `named`, else $SLUICE_STATE_DIR, else `DEFAULT_STATE_DIR`.

    Raises:
        SetupError: this user has no home directory, and none is named.
    """
    chosen = named or Path(os.environ.get(STATE_DIR_VARIABLE) or DEFAULT_STATE_DIR)
    try:
        return chosen.expanduser().resolve()
    except RuntimeError as error:
        raise SetupError(
            f"state directory: {chosen} has no home directory to stand in; "
            f"name one with --state-dir or {STATE_DIR_VARIABLE}"
        ) from error


def try_lock(path: Path) -> BinaryIO | None:
    """Lock a file until it is closed or this process ends; None when another process has it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_locked(root: Path) -> bool:
    """Tell whether a supervisor runs in `root`."""
    try:
        descriptor = os.open(root / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        try:
            # Shared, so that two commands that look at the same moment do not take each other for a supervisor.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def find_mesh(root: Path) -> LocalMesh | None:
    """Return the mesh that runs in `root`; None when none does, or its state cannot be read."""
    try:
        # The lock is tried last: it must be free for a supervisor that starts, which has no state yet.
        state = json.loads((root / STATE).read_text(encoding="utf-8"))
        mesh = LocalMesh(root, state["pid"], state["address"], state["ca"], _key_in(root))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mesh if is_locked(root) else None


def _key_in(root: Path) -> str | None:
    try:
        return (root / MESH_KEY).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
