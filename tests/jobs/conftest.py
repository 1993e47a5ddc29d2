"""A local HTTP server that notes what it gets; processes of jobs with a double in the place of the gateways."""

import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes


@dataclass
class Receiver:
    """A server of one file, which takes what is posted, too.

    Attributes:
        got: headers and bodies of what was posted.
        asked: headers of each request.
        statuses: of each answer in turn; None, and later: the right one.
        cuts: of each answer in turn, how many bytes of its body go before it is cut; None, and later: all.
        headers: of each answer.
        ranges: whether it serves them.
        chunked: whether it sends chunks in place of a length.
    """

    port: int = 0
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    body: bytes = b"hello"
    cuts: list[int | None] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    chunked: bool = False

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """The server."""
    served = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            served.got.append(({key.lower(): value for key, value in self.headers.items()}, body))
            self.do_GET()

        def do_GET(self) -> None:
            served.asked.append({key.lower(): one for key, one in self.headers.items()})
            status = served.statuses.pop(0) if served.statuses else None
            cut = served.cuts.pop(0) if served.cuts else None
            same = self.headers.get("If-Range") == served.headers.get("ETag")
            begin = 0
            if served.ranges and same and "Range" in self.headers:
                begin = int(self.headers["Range"][6:-1])
            body, whole = served.body[begin:], len(served.body)
            self.send_response(status or (206 if begin else 200))
            for name, value in served.headers.items():
                self.send_header(name, value)
            self.send_header("Location", "http://127.0.0.1:1/")
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{whole - 1}/{whole}")
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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayDouble]:
    async with GatewayDouble() as double:
        yield double


@pytest.fixture
async def processes(
    nats_url: str, gateway: GatewayDouble, tmp_path: Path
) -> AsyncIterator[Processes]:
    async with Processes(nats_url, gateway.address, tmp_path) as running:
        yield running
