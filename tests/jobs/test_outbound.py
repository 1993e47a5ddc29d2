"""What a URL of a caller may reach."""

import socket
from contextlib import suppress
from threading import Event, Thread

import pytest

from jobs.outbound import Outbound
from sluice.errors import InvalidRequest, TransportUnavailable
from tests.jobs.conftest import Receiver

# Behind the usual ones: IPv4 in IPv6, NAT64 (RFC 6052, 8215), 6to4, Teredo, ORCHIDv2, site-local, discard-only,
# documentation, segment routing, multicast, protocols.
PRIVATE = """
127.0.0.1 localhost 169.254.169.254 10.1.2.3 192.168.0.1 0.0.0.0 2130706433 224.0.0.1 192.0.0.9 192.88.99.1
100.64.0.1 198.18.0.1 240.0.0.1 255.255.255.255 [::1] [fd00::1] [::ffff:10.0.0.1] [::10.1.2.3] [::ffff:0:10.1.2.3]
[64:ff9b::a01:203] [64:ff9b:1::a01:203] [2002:a01:203::1] [2001::1] [2001:20::1] [fec0::1] [fe80::1] [100::1]
[2001:db8::1] [3fff::1] [5f00::1] [ff02::1]
"""


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/x", *map("https://{}/x".format, PRIVATE.split())]
)
def test_private_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="private"):
        Outbound().check(url, "url")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://example.com/x", "not an http"),
        ("https:///x", "not an http"),
        ("https://user@example.com/", "user"),
        ("https://example.com/a b", "white space"),
        ("https://example.com/\r\nX: y", "white space"),
        ("https://example.com:99999/", "not a URL"),
        ("http://example.com/x", "not https"),
    ],
)
def test_what_is_no_plain_url_is_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Outbound(resolve=lambda *_: ["93.184.216.34"]).check(url, "url")


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.org"])
def test_what_is_no_name_of_a_host_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest, match="not a valid host name"):
        Outbound().check(f"https://{host}/x", "url")


def test_public_addresses_may_be_reached() -> None:
    for host in ("93.184.215.14", "[2606:2800:21f:cb07:6820:80da:af6b:8b2c]", "[2a00::1]"):
        Outbound().check(f"https://{host}/x", "url")


def test_a_server_that_never_ends_its_answer_is_cut_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        got = list[socket.socket]()

        def drip() -> None:
            got.append(server.accept()[0])
            with suppress(OSError):
                while True:
                    got[0].sendall(b"H")
                    event.wait(0.01)

        event = Event()
        dripping = Thread(target=drip)
        dripping.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        with pytest.raises(TransportUnavailable):
            Outbound(("127.0.0.1",), post_s=0.2).post(url, {}, b"{}", "url")
        dripping.join(20)
        assert not dripping.is_alive()
        got[0].close()


def test_a_name_with_one_private_address_is_refused() -> None:
    outbound = Outbound(resolve=lambda *_: ["93.184.216.34", "10.0.0.1"])
    with pytest.raises(InvalidRequest, match=r"10\.0\.0\.1"):
        outbound.check("https://example.com/", "url")


def test_what_the_operator_lists_may_be_reached() -> None:
    private = Outbound(["10.0.0.0/8", "hooks.internal"], resolve=lambda *_: ["10.0.0.1"])
    assert private.check("http://a.example/", "url").address == "10.0.0.1"
    other = Outbound(["hooks.internal"], resolve=lambda *_: ["192.168.0.1"])
    assert other.check("https://hooks.internal/", "url").port == 443
    with pytest.raises(InvalidRequest):
        other.check("https://a.example/", "url")


def test_a_name_that_cannot_be_resolved_may_be_there_later() -> None:
    def nothing(host: str, port: int) -> list[str]:
        raise OSError(host)

    with pytest.raises(TransportUnavailable) as raised:
        Outbound(resolve=nothing).check("https://example.com/", "url")
    assert raised.value.retry_after_s


def test_the_connection_goes_to_the_address_that_was_checked(receiver: Receiver) -> None:
    asked: list[str] = []

    def once(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    outbound = Outbound(["127.0.0.1"], resolve=once)
    url = f"http://name.invalid:{receiver.port}/hook?a=b"
    assert outbound.post(url, {"X-A": "1"}, b"body", "url") == 200
    (headers, body) = receiver.got[0]
    assert (headers["host"], headers["x-a"], body) == (
        f"name.invalid:{receiver.port}",
        "1",
        b"body",
    )
    assert asked == ["name.invalid"]


def test_redirects_are_not_followed(receiver: Receiver) -> None:
    receiver.statuses += [302, 302]
    outbound = Outbound(["127.0.0.1"])
    assert outbound.post(receiver.url, {}, b"", "url") == 302
    with pytest.raises(InvalidRequest, match="302"):
        list(outbound.read(receiver.url, "url"))


def test_read_yields_bytes_and_types_refused_connections(receiver: Receiver) -> None:
    outbound = Outbound(["127.0.0.1"])
    assert b"".join(outbound.read(receiver.url, "url")) == b"hello"
    with pytest.raises(TransportUnavailable):
        outbound.post("http://127.0.0.1:1/", {}, b"", "url")
