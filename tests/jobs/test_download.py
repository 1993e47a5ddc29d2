"""What is behind a URL is read whole, whatever connections break, or not at all."""

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.outbound import FAILURES_MAX, Outbound
from sluice.errors import InvalidRequest, TransportUnavailable
from tests.jobs.conftest import Receiver

BODY = bytes(range(256)) * 40


@pytest.fixture
def origin(receiver: Receiver) -> Receiver:
    receiver.body, receiver.headers = BODY, {"ETag": '"v1"'}
    return receiver


def reading(origin: Receiver, waits: list[float] | None = None) -> Iterator[bytes]:
    outbound = Outbound(["127.0.0.1"], wait=(waits if waits is not None else []).append)
    return outbound.read(origin.url, "spec.input.url")


@pytest.mark.parametrize("chunked", [False, True])
def test_cut_download_continues_where_it_broke(origin: Receiver, chunked: bool) -> None:
    origin.chunked, origin.cuts, origin.statuses = chunked, [5000, None, 700], [None, 503]
    waits: list[float] = []
    assert b"".join(reading(origin, waits)) == BODY
    assert len(origin.asked) == 4
    assert all(one["if-range"] == '"v1"' for one in origin.asked[1:])
    assert waits == [0.5, 1.0, 0.5], "longer where nothing came"


@pytest.mark.parametrize(
    ("change", "said", "asked"),
    [
        ({"headers": {}}, f"5000 of {len(BODY)} bytes", 1),
        ({"headers": {}, "chunked": True}, "127", 1),
        ({"headers": {"ETag": 'W/"v1"'}}, "127", 1),
        ({"ranges": False}, "changed", 2),
        ({"statuses": [500]}, "says 500", 1),
        ({"statuses": [429]}, "says 429", 1),
        ({"cuts": [5000, *[0] * 50]}, "127", FAILURES_MAX + 1),
    ],
    ids=["no-version", "no-length", "weak", "no-ranges", "fault", "busy", "dead"],
)
def test_what_is_not_whole_is_unavailable(
    origin: Receiver, change: dict[str, Any], said: str, asked: int
) -> None:
    for name, value in {"cuts": [5000], **change}.items():
        setattr(origin, name, value)
    with pytest.raises(TransportUnavailable, match=said):
        list(reading(origin))
    assert len(origin.asked) == asked


@pytest.mark.parametrize(
    "change",
    [{"body": BODY[::-1], "headers": {"ETag": '"v2"'}}, {"body": BODY + b"more"}],
    ids=["version", "length"],
)
def test_file_that_changes_while_it_is_read_fails(origin: Receiver, change: dict[str, Any]) -> None:
    origin.cuts = [5000]
    pieces, got = reading(origin), b""
    while len(got) < 5000:
        got += next(pieces)
    assert got == BODY[:5000]
    for name, value in change.items():
        setattr(origin, name, value)
    with pytest.raises(TransportUnavailable, match="changed while it was read"):
        next(pieces)


def test_status_for_good_is_refused(origin: Receiver) -> None:
    origin.statuses = [403]
    with pytest.raises(InvalidRequest, match="says 403"):
        list(reading(origin))
