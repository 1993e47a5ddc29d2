"""Compiled databases of patterns, cached on disk: compiling takes most of a second, reading a few milliseconds.

A file is called by the hash of its patterns, of this format and of hyperscan's version. Vectorscan
itself refuses one that is damaged, or was made by another version of it or for another processor.
If file or folder cannot be used, the patterns are compiled. The folder must be this user's alone,
because a database is executed, not only read.
"""

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import hyperscan

logger = logging.getLogger(__name__)

FILES_MAX: Final = 32
"""Files that are kept; the least recently read ones are removed."""
FLAGS: Final = hyperscan.HS_FLAG_UTF8 | hyperscan.HS_FLAG_SINGLEMATCH | hyperscan.HS_FLAG_PREFILTER

_FORMAT: Final = 1
_SUFFIX: Final = ".hsdb"


def database_of(patterns: Sequence[str]) -> hyperscan.Database:
    """Return `patterns` ready to scan a whole text, with a `hyperscan.Scratch`; raises `hyperscan.error`."""
    path = _path_for(patterns)
    if path is None:
        return compiled(patterns)
    try:
        database = hyperscan.loadb(path.read_bytes(), hyperscan.HS_MODE_BLOCK)
        os.utime(path)
    except (OSError, hyperscan.error) as error:
        logger.debug("%s cannot be used: %s", path, error)
        database = compiled(patterns)
        _write(path, database)
    return database


def compiled(patterns: Sequence[str]) -> hyperscan.Database:
    """Compile `patterns` now; raises `hyperscan.error`."""
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    database.compile(
        expressions=[pattern.encode() for pattern in patterns],
        ids=list(range(len(patterns))),
        flags=[FLAGS] * len(patterns),
    )
    return database


def folder() -> Path:
    """Return $XDG_CACHE_HOME/sluice/rules, else ~/.cache/sluice/rules."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache, "sluice", "rules")


def _path_for(patterns: Sequence[str]) -> Path | None:
    """Return the file for `patterns`, or None if nothing can be cached."""
    identity = json.dumps([_FORMAT, version("hyperscan"), FLAGS, *patterns]).encode()
    with contextlib.suppress(OSError, RuntimeError):  # a user without a home
        cache = folder()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = cache.lstat()
        # Whoever can write a database there runs code in this process.
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            cache.chmod(0o700)
            return cache / (hashlib.sha256(identity).hexdigest() + _SUFFIX)
    return None


def _write(path: Path, database: hyperscan.Database) -> None:
    with contextlib.suppress(OSError):
        # Its name counts as one of ours, so that what a killed process left is removed in its turn.
        descriptor, draft = tempfile.mkstemp(suffix=_SUFFIX, dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(hyperscan.dumpb(database))
        os.replace(draft, path)  # in one step: a gateway that starts now reads all of it or nothing
        _remove_oldest(path.parent)


def _remove_oldest(cache: Path) -> None:
    files = sorted(cache.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
    for path in files[:-FILES_MAX]:
        path.unlink(missing_ok=True)
