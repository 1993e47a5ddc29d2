"""The disk of a mesh: what a start needs, what streams may take, and what happens when it was full.

nats-server reserves the limit of each stream when the stream is made, by default from three quarters of the disk that
is free at that moment. With that a mesh would start only on a disk with room for all that it might ever keep, and not
again on one that has filled up since. So its limit is set from the settings (`file_limit`): streams that fit their
limits are never refused, and a start needs `START_BYTES`.

A stream whose write found no room takes none until nats-server is started again, and publishers get no answer.
`nats_watcher` restarts it when there is room again.
"""

import asyncio
import logging
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Final

from sluice.errors import SetupError
from sluice.settings import Settings
from sluice.wire import jetstream
from supervisor.child import Child
from supervisor.supervisor import Watcher

logger = logging.getLogger(__name__)

START_BYTES: Final = 64 * 1024**2
"""Free disk that a start needs, for files, logs and the beginning of each stream."""
CHECK_S: Final = 3.0
"""How often the log of nats-server is read, in seconds."""
_FAILED: Final = re.compile(rb"critical write error|out of .*resources|will be DISABLED", re.I)
"""How nats-server says that a stream takes no writes any more, 2.12 and before."""
_DISK_SHARE: Final = 0.75
"""The part of the free disk that nats-server gives to streams by default; those of the operator may use it."""
_KEYS_NAMED: Final = 3
_MIB: Final = 1024**2
_FIXED: Final = (
    *(jetstream.DEAD_LETTERS, jetstream.KEYS, jetstream.SPENDING, jetstream.DAYS),
    *(jetstream.POLICIES, jetstream.SECRETS, jetstream.DRAINS, jetstream.API_KEYS, jetstream.JOBS),
)


def file_limit(settings: Settings, folder: Path) -> int:
    """Return how many bytes streams may reserve: what all settings together can ask for, or more where there is more.

    `folder`: where they will be; it need not exist.
    """
    while not folder.exists():
        folder = folder.parent
    # nats-server counts a stream a second time while it looks whether one that is asked for exists.
    needed = 2 * (sum(size for size, _ in _limits(settings).values()) + _fixed_bytes())
    return max(needed, int(shutil.disk_usage(folder).free * _DISK_SHARE))


def check_room(settings: Settings, store: Path) -> None:
    """Refuse to start on a full disk, and warn of one that streams can fill.

    Raises:
        SetupError: fewer than `START_BYTES` are free.
    """
    free = shutil.disk_usage(store).free
    if free < START_BYTES:
        raise SetupError(
            f"state directory: {_size(free)} are free in {store}, and a start needs {_size(START_BYTES)}; "
            "make room, or name a folder on another disk with --state-dir"
        )
    sizes = reserved(settings)
    used = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    needed = sum(sizes.values()) + _fixed_bytes() - used
    if free < needed:
        largest = sorted(sizes, key=lambda key: -sizes[key])[:_KEYS_NAMED]
        keys = ", ".join(f"{key} ({_size(sizes[key])})" for key in largest)
        logger.warning(
            "disk may fill up: streams may grow by %s, %s free in %s; free space or lower %s",
            _size(needed),
            _size(free),
            store,
            keys,
        )


def reserved(settings: Settings) -> dict[str, int]:
    """Return the limits of the streams that a mesh makes, in bytes, by the key of the setting."""
    return {key: size * is_used for key, (size, is_used) in _limits(settings).items()}


def _limits(settings: Settings) -> dict[str, tuple[int, bool]]:
    """Return the limits of all streams, also of those that a reload may add, and whether there is one now."""
    records, jobs, has_jobs = settings.records, settings.jobs, bool(settings.jobs.replicas)
    outcomes = settings.routing.outcomes
    return {
        "records.max_mib": (records.max_mib * _MIB, True),
        "records.audit_max_mib": (records.audit_max_mib * _MIB, True),
        "routing.outcomes.max_mib": (outcomes.max_mib * _MIB, bool(outcomes.tenants)),
        "cache.max_mib": (settings.cache.max_mib * _MIB, settings.cache.enabled),
        "jobs.inputs_max_bytes": (jobs.inputs_max_bytes, has_jobs),
        "jobs.results_max_bytes": (jobs.results_max_bytes, has_jobs),
    }


def _fixed_bytes() -> int:
    return sum(config.max_bytes or 0 for config in _FIXED)


def _size(size: float) -> str:
    return f"{size / _MIB:.0f} MiB" if size < 1024 * _MIB else f"{size / 1024 / _MIB:.1f} GiB"


def nats_watcher(store: Path, log: Path, check_s: float = CHECK_S) -> Watcher:
    """Return a watcher that restarts nats-server when it could not write to `store` and the disk has room again.

    `log` is the output of nats-server.
    """

    async def watcher(child: Child) -> None:
        failed, position = False, child.log_start
        while not failed or shutil.disk_usage(store).free < START_BYTES:
            await asyncio.sleep(check_s)
            has_failed, position = _read_on(log, position)
            failed = failed or has_failed
        if not child.ending:
            logger.warning(
                "restarting nats: its disk was full and has free space again (%s)", store
            )
            child.send(signal.SIGTERM)

    return watcher


def _read_on(log: Path, position: int) -> tuple[bool, int]:
    """Tell whether nats-server has logged since `position` that it could not write, and where its log ends."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(min(position, end))  # a log that is shorter was rotated
        return any(_FAILED.search(line) for line in file), file.tell()
