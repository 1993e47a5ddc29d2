import os
import socket

import pytest

from sluice import ports
from sluice.errors import SetupError


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:7", ("::1", 7)),
    ],
)
def test_split_address(address: str, parts: tuple[str, int]) -> None:
    assert ports.split_address(address, "gateway.address") == parts


@pytest.mark.parametrize("address", ["", "50051", ":1", "host:", "host:port", "host:65536"])
def test_split_address_names_the_setting(address: str) -> None:
    with pytest.raises(SetupError, match=r"^gateway\.address: .* is not HOST:PORT"):
        ports.split_address(address, "gateway.address")


def test_a_free_port_is_free_and_below_the_ephemeral_range() -> None:
    port = ports.free_port()
    assert ports.listen_problem("127.0.0.1", port) is None
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        assert port < int(file.read().split()[0])


def test_a_taken_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        port = server.getsockname()[1]
        problem = ports.listen_problem("127.0.0.1", port)
        assert problem is not None
        assert f"(pid {os.getpid()})" in problem
        assert ports.answers("127.0.0.1", port, 1.0)
    assert not ports.answers("127.0.0.1", port, 1.0)


def test_an_address_of_another_machine() -> None:
    assert ports.listen_problem("192.0.2.1", 1024) == "not an address of this machine"
    assert ports.listen_problem("no-such-host.invalid", 1024) == "not an address of this machine"
