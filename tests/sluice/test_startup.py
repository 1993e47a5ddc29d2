import sys
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


def test_an_address_of_another_machine() -> None:
    assert startup.listen_problem("192.0.2.1", 1024) == "not an address of this machine"
    assert startup.listen_problem("no-such-host.invalid", 1024) == "not an address of this machine"


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
