"""Say how much disk the streams of a mesh need, where JetStream refuses them for lack of room."""

import shutil
from pathlib import Path
from typing import Final

from sluice.errors import SetupError
from sluice.settings import Settings
from sluice.wire import jetstream

JETSTREAM_SHARE: Final = 0.75
"""The part of the free disk that nats-server gives to JetStream, unless its configuration says otherwise."""
_NO_ROOM: Final = "insufficient storage"
"""How JetStream refuses a stream that does not fit (error 10047)."""
_KEYS_NAMED: Final = 3
_MIB: Final = 1024**2
_GIB: Final = 1024**3
_FIXED: Final = (
    *(jetstream.DEAD_LETTERS, jetstream.KEYS, jetstream.SPENDING, jetstream.DAYS),
    *(jetstream.POLICIES, jetstream.SECRETS, jetstream.DRAINS, jetstream.API_KEYS, jetstream.JOBS),
)


def check_room(settings: Settings, store: Path) -> None:
    """Refuse to start with a new store whose disk is too small; one that has streams has their room.

    Raises:
        SetupError: JetStream would refuse the streams.
    """
    free = shutil.disk_usage(store).free
    if not (store / "jetstream").exists() and free * JETSTREAM_SHARE < _needed(settings):
        raise SetupError(no_room(settings, store, free))


def explained(error: SetupError, settings: Settings, store: Path) -> SetupError:
    """Return ``error``, or where the disk of ``store`` is too small one that says what to do."""
    if _NO_ROOM not in str(error):
        return error
    return SetupError(no_room(settings, store, shutil.disk_usage(store).free))


def no_room(settings: Settings, store: Path, free: int) -> str:
    """Say what JetStream needs, what there is, and which settings lower it."""
    sizes, needed = reserved(settings), _needed(settings)
    largest = sorted(sizes, key=lambda key: -sizes[key])[:_KEYS_NAMED]
    keys = ", ".join(f"{key} ({_gib(sizes[key])})" for key in largest)
    return (
        f"state directory: the streams of this mesh reserve {_gib(needed)}, and JetStream may use three quarters of the"
        f" {_gib(free)} that are free in {store}; make {_gib(needed / JETSTREAM_SHARE)} free there, name a folder on a"
        f" larger disk with --state-dir, or lower {keys}"
    )


def reserved(settings: Settings) -> dict[str, int]:
    """Return how many bytes each setting reserves for streams, by its key."""
    records, jobs, cache = settings.records, settings.jobs, settings.cache
    outcomes = settings.routing.outcomes
    return {
        "records.max_mib": records.max_mib * _MIB * records.enabled,
        "records.audit_max_mib": records.audit_max_mib * _MIB * records.audit_enabled,
        "routing.outcomes.max_mib": outcomes.max_mib * _MIB * bool(outcomes.tenants),
        "cache.max_mib": cache.max_mib * _MIB * cache.enabled,
        "jobs.inputs_max_bytes": jobs.inputs_max_bytes * bool(jobs.replicas),
        "jobs.results_max_bytes": jobs.results_max_bytes * bool(jobs.replicas),
    }


def _needed(settings: Settings) -> int:
    return sum(reserved(settings).values()) + sum(one.max_bytes or 0 for one in _FIXED)


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"
