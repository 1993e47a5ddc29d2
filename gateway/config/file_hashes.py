"""Hashes of the content of large files, which a process reads once: known by path, inode, size and times.

A file whose content is another has another change time (ctime), which no program can set, so a kept hash is that of the
content. A file that changed a moment ago may change again within the same tick of the clock: its hash is not kept.
"""

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final

PART_BYTES: Final = 16 * 1024 * 1024
"""A file is hashed in parts of this size, several at a time."""
SETTLED_S: Final = 2.0
"""How long ago a file must have changed before its hash is kept, seconds."""
_THREADS: Final = 4
_HUB_BLOB: Final = re.compile(r"/models--[^/]+/blobs/[0-9a-f]{64}$")


def content_hash(file: Path, now: float) -> str:
    """A hash of all of ``file``; raises OSError when it cannot be read.

    Args:
        now: seconds since 1970.
    """
    real = file.resolve()
    if _HUB_BLOB.search(str(real)):
        return real.name  # in the hub's cache a large file is called by its SHA-256
    seen = real.stat()
    read = _kept if now - seen.st_ctime >= SETTLED_S else _read
    return read(real, seen.st_size, seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns)


def _read(file: Path, size: int, *_known_by: int) -> str:
    """A hash of the hashes of the parts."""
    with file.open("rb") as opened, ThreadPoolExecutor(_THREADS) as pool:

        def part(start: int) -> bytes:
            return hashlib.sha256(os.pread(opened.fileno(), PART_BYTES, start)).digest()

        parts = pool.map(part, range(0, size, PART_BYTES))
        return hashlib.sha256(b"".join(parts)).hexdigest()


_kept: Final = cache(_read)
"""What it returned is that of the content; where the file changed meanwhile, nobody asks with these times again."""
