"""What a URL of a caller may reach."""

import pytest

from jobs.outbound import Outbound
from sluice.errors import InvalidRequest, TransportUnavailable
from tests.jobs.conftest import Receiver


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "https://127.0.0.1/x",
        "https://localhost/x",
        "https://[::1]/x",
        "https://[::ffff:10.0.0.1]/x",
        "https://169.254.169.254/latest/meta-data",
        "https://10.1.2.3/x",
        "https://192.168.0.1/x",
        "https://0.0.0.0/x",
        "https://[fd00::1]/x",
        "https://2130706433/x",
        "https://224.0.0.1/x",
    ],
)
def test_private_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="private"):
        Outbound().check(url, "url")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://example.com/x", "no http"),
        ("https:///x", "no http"),
        ("https://user@example.com/", "user"),
        ("https://example.com/a b", "white space"),
        ("https://example.com/\r\nX: y", "white space"),
        ("https://example.com:99999/", "no URL"),
        ("http://example.com/x", "not https"),
    ],
)
def test_what_is_no_plain_url_is_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Outbound(resolve=lambda *_: ["93.184.216.34"]).check(url, "url")


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


def test_reading_gives_the_bytes_and_a_refused_connection_is_typed(receiver: Receiver) -> None:
    outbound = Outbound(["127.0.0.1"])
    assert b"".join(outbound.read(receiver.url, "url")) == b"hello"
    with pytest.raises(TransportUnavailable):
        outbound.post("http://127.0.0.1:1/", {}, b"", "url")
