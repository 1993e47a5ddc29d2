"""A disk that is too small for JetStream: how much is needed, where, and what lowers it."""

from pathlib import Path

import pytest

from sluice.errors import SetupError
from sluice.settings import Settings
from supervisor.disk import check_room, explained, no_room, reserved

REFUSED = SetupError(
    "gateway ended while starting: err_code=10047 'insufficient storage resources'"
)


def test_no_room_says_what_is_needed_where_and_what_lowers_it(tmp_path: Path) -> None:
    message = no_room(Settings(), tmp_path, 2 * 1024**3)
    assert f"three quarters of the 2.0 GiB that are free in {tmp_path}" in message
    assert "--state-dir" in message
    assert "records.audit_max_mib (1.0 GiB), jobs.inputs_max_bytes (1.0 GiB)" in message


def test_reserved_leaves_out_what_is_switched_off() -> None:
    settings = Settings(
        records={"enabled": False, "audit_enabled": False},
        jobs={"replicas": 0},
        cache={"enabled": True, "max_mib": 7},
    )
    assert {key: size for key, size in reserved(settings).items() if size} == {
        "cache.max_mib": 7 * 1024**2
    }


def test_a_new_store_is_checked_before_anything_starts(tmp_path: Path) -> None:
    huge = Settings(jobs={"inputs_max_bytes": 1 << 60})
    with pytest.raises(SetupError, match=r"jobs\.inputs_max_bytes"):
        check_room(huge, tmp_path)
    check_room(Settings(jobs={"inputs_max_bytes": 1 << 20}), tmp_path)
    (tmp_path / "jetstream").mkdir()
    check_room(huge, tmp_path)


def test_only_a_lack_of_room_is_explained(tmp_path: Path) -> None:
    assert "reserve" in str(explained(REFUSED, Settings(), tmp_path))
    other = SetupError("gateway ended while starting")
    assert explained(other, Settings(), tmp_path) is other
