"""Shared memory of a worker: no other user can read what passes through it."""

import mmap
import os
import stat
from pathlib import Path

from model_workers.shared_memory import make_shared_memory_private


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_mapped_regions_become_private_and_no_others() -> None:
    mapped, other = (Path(f"/dev/shm/sluice_test_{os.getpid()}_{n}") for n in ("mapped", "other"))
    try:
        for path in (mapped, other):
            path.write_bytes(bytes(mmap.PAGESIZE))
            path.chmod(0o644)
        with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            make_shared_memory_private()
            make_shared_memory_private()
        assert (mode_of(mapped), mode_of(other)) == (0o600, 0o644)
    finally:
        mapped.unlink()
        other.unlink()
