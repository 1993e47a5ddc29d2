"""The disk of a mesh: what a start needs, what streams may take, and JetStream after a disk was full."""

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import nats
import nats.errors
import pytest

from sluice.errors import SetupError
from sluice.settings import Settings
from sluice.startup import free_port
from sluice.wire.jetstream import JOBS, job_streams
from supervisor.child import ChildSpec
from supervisor.disk import check_room, file_limit, nats_watcher, reserved
from supervisor.nats import NatsConfig, nats_command, wait_for_nats
from supervisor.supervisor import Supervisor

HUGE = Settings(jobs={"inputs_max_bytes": 1 << 56})
BOUND_S = 60.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 100 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(folder)], check=False
    )
    if mounted.returncode:
        pytest.skip("only root mounts")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_reserved_leaves_out_what_is_switched_off() -> None:
    settings = Settings(
        records={"max_mib": 0},
        jobs={"replicas": 0},
        cache={"enabled": True},
    )
    assert {key: size for key, size in reserved(settings).items() if size} == {
        "records.audit_max_mib": 1024 * 1024**2,
        "cache.max_mib": 256 * 1024**2,
    }


def test_file_limit_has_room_for_streams_that_a_reload_adds(tmp_path: Path) -> None:
    assert file_limit(HUGE, tmp_path / "not" / "there") > 1 << 56
    outcomes = Settings(records={"max_mib": 1 << 36})
    assert file_limit(outcomes, tmp_path) > 1 << 56


def test_check_room_warns_of_a_disk_that_streams_can_fill(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_room(HUGE, tmp_path)
    assert "jobs.inputs_max_bytes (67108864.0 GiB)" in caplog.text
    caplog.clear()
    check_room(Settings(jobs={"inputs_max_bytes": 1 << 20}), tmp_path)
    assert not caplog.records


def test_check_room_refuses_a_full_disk(small_disk: Path) -> None:
    check_room(Settings(), small_disk)
    (small_disk / "other").write_bytes(bytes(60 << 20))
    with pytest.raises(SetupError, match=r"40 MiB are free in .*a start needs 64 MiB; make room"):
        check_room(Settings(), small_disk)


async def start_nats(supervisor: Supervisor, store: Path) -> NatsConfig:
    config = NatsConfig(free_port(), store / "nats", max_file_bytes=file_limit(Settings(), store))
    command = nats_command(config, store / "nats.conf")
    log = store.parent / "nats.log"
    supervisor.start(ChildSpec("nats", command, log=log), nats_watcher(config.store, log, 0.05))
    await wait_for_nats(config.url, BOUND_S)
    return config


async def test_streams_of_all_settings_fit_a_small_disk(small_disk: Path) -> None:
    supervisor = Supervisor()
    try:
        config = await start_nats(supervisor, small_disk)
        client = await nats.connect(config.url)
        streams = JOBS, *job_streams(Settings().jobs)
        for stream in (*streams, *streams):  # as at the next start
            await client.jetstream().add_stream(stream)
        await client.close()
    finally:
        await supervisor.stop()


async def test_jetstream_goes_on_after_a_full_disk(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    filler, supervisor = small_disk / "filler", Supervisor()
    try:
        config = await start_nats(supervisor, small_disk)
        client = await nats.connect(config.url, max_reconnect_attempts=-1)
        context = client.jetstream(timeout=2.0)
        await context.add_stream(name="S", subjects=["s.>"])
        await context.publish("s.a", b"before")
        fill(filler)
        with pytest.raises(nats.errors.TimeoutError):
            await context.publish("s.b", bytes(1 << 19), timeout=1.0)
        first = supervisor.pids["nats"]
        filler.unlink()
        await supervisor.wait_for(lambda: supervisor.pids.get("nats", first) != first, BOUND_S)
        assert "has free space again" in caplog.text
        await wait_for_nats(config.url, BOUND_S)
        assert (await context.get_msg("S", 1)).data == b"before"
        await context.publish("s.a", b"after")
        await client.close()
    finally:
        await supervisor.stop()


def fill(path: Path) -> None:
    """Write until nothing fits any more."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 20)):
                os.fsync(file.fileno())
        except OSError:
            return
