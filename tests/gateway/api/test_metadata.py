import pytest

from gateway.api.methods import is_local


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:40000", True),
        ("ipv6:%5B::1%5D:40000", True),
        ("unix:", True),
        ("ipv4:192.0.2.7:40000", False),
        ("ipv6:%5B2001:db8::1%5D:40000", False),
        ("", False),
    ],
)
def test_who_runs_on_this_machine(peer: str, local: bool) -> None:
    assert is_local(peer) == local
