import gc
import mmap
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Final

import pytest

from sluice import startup
from sluice.errors import SetupError

PAGE: Final = 2 * 1024 * 1024
MADV_COLLAPSE: Final = 25


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:7", ("::1", 7)),
    ],
)
def test_split_address(address: str, parts: tuple[str, int]) -> None:
    assert startup.split_address(address, "gateway.address") == parts


@pytest.mark.parametrize("address", ["", "50051", ":1", "host:", "host:port", "host:65536"])
def test_split_address_names_the_setting(address: str) -> None:
    with pytest.raises(SetupError, match=r"^gateway\.address: .* is not HOST:PORT"):
        startup.split_address(address, "gateway.address")


def test_a_free_port_is_free_and_below_the_ephemeral_range() -> None:
    port = startup.free_port()
    assert startup.listen_problem("127.0.0.1", port) is None
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        assert port < int(file.read().split()[0])


def test_a_taken_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        port = server.getsockname()[1]
        problem = startup.listen_problem("127.0.0.1", port)
        assert problem is not None
        assert f"(pid {os.getpid()})" in problem
        assert startup.answers("127.0.0.1", port, 1.0)
    assert not startup.answers("127.0.0.1", port, 1.0)


def test_an_address_of_another_machine() -> None:
    assert startup.listen_problem("192.0.2.1", 1024) == "not an address of this machine"
    assert startup.listen_problem("no-such-host.invalid", 1024) == "not an address of this machine"


def test_what_is_allocated_at_the_start_is_not_collected_again() -> None:
    kept = [[number] for number in range(1000)]
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    try:
        startup.freeze_heap()
        assert gc.get_freeze_count() > before + len(kept)
        assert gc.get_threshold() == startup.COLLECT
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_what_is_allocated_at_the_start_is_on_huge_pages() -> None:
    size = 8 * PAGE
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"1" * size)
        before = huge_kib()
        startup.freeze_heap()
        gc.unfreeze()
        for thread in threading.enumerate():
            if thread.name == "huge pages":
                thread.join(30.0)
        more = huge_kib() - before
        if not can_collapse(memory):
            pytest.skip("the system has no huge pages for what is there")
    assert more >= 6 * PAGE // 1024


def huge_kib() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return int(rollup.partition("AnonHugePages:")[2].split()[0])


def can_collapse(memory: mmap.mmap) -> bool:
    """Whether the system moves what is there to huge pages when it is told to."""
    try:
        memory.madvise(MADV_COLLAPSE)
    except OSError:
        return False
    return True


def test_a_child_reads_settings_from_its_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_NATS__PORT", "0")
    monkeypatch.setenv("SLUICE_MODELS", "[]")
    monkeypatch.setenv("SLUICE_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    environment = startup.child_environment()
    assert "SLUICE_NATS__PORT" not in environment
    assert "SLUICE_MODELS" not in environment
    assert environment["SLUICE_ADDRESS"] == "127.0.0.1:1"
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:4317"
    assert startup.child_environment(keep_settings=True)["SLUICE_NATS__PORT"] == "0"


def test_one_thread_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert startup.child_environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert startup.child_environment()["OMP_NUM_THREADS"] == "4"


def test_our_modules_are_found_from_any_folder() -> None:
    environment = startup.child_environment()
    root = str(Path(startup.__file__).resolve().parents[1])
    assert root in environment.get("PYTHONPATH", "").split(":") + sys.path
    assert startup.module_command("batcher", Path("/c.yaml")) == (
        *(sys.executable, "-P", "-m", "batcher"),
        *("--config", "/c.yaml"),
    )
