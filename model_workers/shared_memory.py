"""Restricts Triton's shared memory, which it makes readable for every user whatever the umask."""

from contextlib import suppress
from pathlib import Path
from typing import Final

_FOLDER: Final = "/dev/shm/"


def make_shared_memory_private() -> None:
    """Make the mapped shared memory of this process private, because prompts pass through it.

    Call it before the first request: a user who has opened a region by then can read on.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        name = line[line.find("/") :] if _FOLDER in line else ""
        if name.startswith(_FOLDER):
            with suppress(FileNotFoundError, PermissionError):  # removed; of another user
                Path(name).chmod(0o600)
