"""Shared memory of Triton, which it makes readable for every user of the machine, whatever the umask."""

from contextlib import suppress
from pathlib import Path
from typing import Final

_FOLDER: Final = "/dev/shm/"


def make_shared_memory_private() -> None:
    """Take the shared memory that this process has mapped from other users; prompts will pass through it.

    Call it before the first request: who has opened a region by then can read on.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        name = line[line.find("/") :] if _FOLDER in line else ""
        if name.startswith(_FOLDER):
            with suppress(FileNotFoundError, PermissionError):  # removed; of another user
                Path(name).chmod(0o600)
