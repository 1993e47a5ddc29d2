"""Hashes of the content of large files, read once: kept in the user's cache folder by path, inode, size and times.

A file whose content is another has another change time (ctime), which no program can set, so a kept hash is that of the
content. A file that changed a moment ago may change again within the same tick of the clock: its hash is not kept.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

PART_BYTES: Final = 16 * 1024 * 1024
"""A file is hashed in parts of this size, several at a time."""
SETTLED_S: Final = 2.0
"""How long ago a file must have changed before its hash is kept, seconds."""
_THREADS: Final = 4
_SMALL_BYTES: Final = 1024 * 1024
_HUB_BLOB: Final = re.compile(r"/models--[^/]+/blobs/[0-9a-f]{64}$")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_known: Final[dict[str, str]] = {}
"""Those of this process, by `_key`: where the cache folder cannot be written, each process reads a file once."""


def content_hash(file: Path, now: float) -> str:
    """A hash of all of ``file``; raises OSError when it cannot be read.

    Args:
        now: seconds since 1970.
    """
    real = file.resolve()
    if _HUB_BLOB.search(str(real)):
        return real.name  # in the hub's cache a large file is called by its SHA-256
    seen = real.stat()
    if seen.st_size <= _SMALL_BYTES:
        return hashlib.sha256(real.read_bytes()).hexdigest()
    key = _key(real, seen)
    found = _known.get(key) or _load(key)
    if found is None:
        found = _read(real, seen.st_size)
        if _key(real, real.stat()) != key or now - seen.st_ctime < SETTLED_S:
            return found
        _keep(key, found)
    _known[key] = found
    return found


def _key(file: Path, seen: os.stat_result) -> str:
    parts = (str(file), seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _read(file: Path, size: int) -> str:
    """A hash of the hashes of the parts."""
    with file.open("rb") as opened, ThreadPoolExecutor(_THREADS) as pool:
        parts = _parts(pool, opened.fileno(), size)
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _parts(pool: ThreadPoolExecutor, descriptor: int, size: int) -> Iterator[bytes]:
    def part(start: int) -> bytes:
        return hashlib.sha256(os.pread(descriptor, PART_BYTES, start)).digest()

    return pool.map(part, range(0, size, PART_BYTES))


def _folder() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return Path(named or Path.home() / ".cache") / "sluice" / "hashes"


def _load(key: str) -> str | None:
    try:
        found = (_folder() / key).read_text(encoding="ascii")
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home
        return None
    return found if _HASH.fullmatch(found) else None


def _keep(key: str, found: str) -> None:
    """Where nothing can be written the file is read again at the next start."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = folder / f"{key}.{os.getpid()}"
        new.write_text(found, encoding="ascii")
        new.replace(folder / key)
    except (OSError, RuntimeError):
        return
