"""What is behind a URL is read whole, whatever connections break, or not at all."""

import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from jobs.download import FAILURES_MAX, Download
from jobs.outbound import Outbound
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


def read(origin: Origin, waits: list[float] | None = None) -> bytes:
    outbound = Outbound(["127.0.0.1"], wait=(waits if waits is not None else []).append)
    return b"".join(outbound.read(origin.url, "spec.input.url"))


@pytest.mark.parametrize("chunked", [False, True])
def test_cut_download_continues_where_it_broke(origin: Origin, chunked: bool) -> None:
    origin.chunked, origin.cuts = chunked, [5000, 700]
    waits: list[float] = []
    assert read(origin, waits) == BODY
    assert len(origin.asked) == 3
    assert all(one["if-range"] == '"v1"' for one in origin.asked[1:])
    assert len(waits) == 2


def test_server_without_ranges_sends_the_same_version_again(origin: Origin) -> None:
    origin.ranges, origin.cuts = False, [5000]
    assert read(origin) == BODY


def test_old_last_modified_names_a_version(origin: Origin) -> None:
    origin.headers = {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
    origin.ranges, origin.cuts = False, [5000]
    assert read(origin) == BODY
    assert origin.asked[1]["if-range"] == "Mon, 01 Jan 2024 00:00:00 GMT"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("headers", [{}, {"ETag": 'W/"v1"'}, {"Last-Modified": "yesterday"}])
def test_cut_download_without_a_version_fails(
    origin: Origin, headers: dict[str, str], chunked: bool
) -> None:
    origin.headers, origin.cuts, origin.chunked = headers, [5000], chunked
    with pytest.raises(TransportUnavailable):
        read(origin)
    assert len(origin.asked) == 1


def test_short_body_says_how_much_came(origin: Origin) -> None:
    origin.headers, origin.cuts = {}, [5000]
    with pytest.raises(TransportUnavailable, match=f"5000 of {len(BODY)} bytes"):
        read(origin)


@pytest.mark.parametrize("ranges", [False, True])
def test_file_that_changes_while_it_is_read_fails(origin: Origin, ranges: bool) -> None:
    origin.ranges, origin.cuts = ranges, [5000]
    pieces = Outbound(["127.0.0.1"], wait=lambda _: None).read(origin.url, "url")
    assert next(pieces) == BODY[:5000]
    origin.body, origin.headers = BODY[::-1], {"ETag": '"v2"'}
    with pytest.raises(TransportUnavailable, match="changed"):
        next(pieces)


def test_dead_server_is_given_up(origin: Origin) -> None:
    origin.cuts = [5000, *[0] * 50]
    waits: list[float] = []
    with pytest.raises(TransportUnavailable):
        read(origin, waits)
    assert len(origin.asked) == FAILURES_MAX + 1
    assert waits == sorted(waits)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_status_that_may_pass_is_unavailable(origin: Origin, status: int) -> None:
    origin.statuses = [status]
    with pytest.raises(TransportUnavailable, match=f"says {status}"):
        read(origin)


def test_status_for_good_is_refused(origin: Origin) -> None:
    origin.statuses = [403]
    with pytest.raises(InvalidRequest, match="says 403"):
        read(origin)


def test_rest_may_wait_for_a_busy_server(origin: Origin) -> None:
    origin.cuts, origin.statuses = [5000], [None, 503]
    assert read(origin) == BODY


def test_wrong_range_is_not_taken(origin: Origin) -> None:
    origin.cuts = [5000]
    pieces = Outbound(["127.0.0.1"], wait=lambda _: None).read(origin.url, "url")
    assert next(pieces) == BODY[:5000]
    origin.body = BODY + b"more"
    with pytest.raises(TransportUnavailable, match="range"):
        next(pieces)


def test_refused_connection_is_not_resumed() -> None:
    def never(_: object) -> Any:
        raise TransportUnavailable("refused")

    with pytest.raises(TransportUnavailable, match="refused"):
        list(Download(never, "host", "url").pieces())
