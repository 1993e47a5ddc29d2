"""What is behind a URL is read whole, whatever connections break, or not at all."""

import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from jobs.outbound import FAILURES_MAX, Outbound
from sluice.errors import InvalidRequest, TransportUnavailable

BODY = bytes(range(256)) * 40


@dataclass
class Origin:
    """A server of one file.

    Attributes:
        cuts: of each connection in turn, how many bytes of its body go before it is cut; None, and later: all.
        headers: of each answer.
        ranges: whether it serves them.
        chunked: whether it sends chunks in place of a length.
        statuses: of each answer in turn; None, and later: the right one.
        asked: the headers of each request.
    """

    body: bytes = BODY
    cuts: list[int | None] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"v1"'})
    ranges: bool = True
    chunked: bool = False
    statuses: list[int | None] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/in.jsonl"


@pytest.fixture
def origin() -> Iterator[Origin]:
    served = Origin()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            served.asked.append({key.lower(): one for key, one in self.headers.items()})
            status = served.statuses.pop(0) if served.statuses else None
            cut = served.cuts.pop(0) if served.cuts else None
            begin = int(self.headers.get("Range", "bytes=0-")[6:-1]) if served.ranges else 0
            if self.headers.get("If-Range", served.headers.get("ETag")) != served.headers.get(
                "ETag"
            ):
                begin = 0
            body = served.body[begin:]
            self.send_response(status or (206 if begin else 200))
            for name, value in served.headers.items():
                self.send_header(name, value)
            if begin:
                last = len(served.body) - 1
                self.send_header("Content-Range", f"bytes {begin}-{last}/{len(served.body)}")
            if served.chunked:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if served.chunked:
                self.wfile.write(f"{len(body):x}\r\n".encode())
            self.wfile.write(body[:cut])
            if served.chunked and cut is None:
                self.wfile.write(b"\r\n0\r\n\r\n")
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reading(origin: Origin, waits: list[float] | None = None) -> Iterator[bytes]:
    outbound = Outbound(["127.0.0.1"], wait=(waits if waits is not None else []).append)
    return outbound.read(origin.url, "spec.input.url")


@pytest.mark.parametrize("chunked", [False, True])
def test_cut_download_continues_where_it_broke(origin: Origin, chunked: bool) -> None:
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
    origin: Origin, change: dict[str, Any], said: str, asked: int
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
def test_file_that_changes_while_it_is_read_fails(origin: Origin, change: dict[str, Any]) -> None:
    origin.cuts = [5000]
    pieces, got = reading(origin), b""
    while len(got) < 5000:
        got += next(pieces)
    assert got == BODY[:5000]
    for name, value in change.items():
        setattr(origin, name, value)
    with pytest.raises(TransportUnavailable, match="changed while it was read"):
        next(pieces)


def test_status_for_good_is_refused(origin: Origin) -> None:
    origin.statuses = [403]
    with pytest.raises(InvalidRequest, match="says 403"):
        list(reading(origin))
