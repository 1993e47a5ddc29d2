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
    """Answers with the next of ``statuses``, with 200 when there is none.

    Attributes:
        got: headers and bodies.
        cuts: of each answer in turn, how many bytes of its body go before it is cut.
    """

    port: int = 0
    statuses: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    body: bytes = b"hello"
    cuts: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """The server."""
    noted = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            noted.got.append(({key.lower(): value for key, value in self.headers.items()}, body))
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            self.send_response(noted.statuses.pop(0) if noted.statuses else 200)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.send_header("Content-Length", str(len(noted.body)))
            self.end_headers()
            self.wfile.write(noted.body[: noted.cuts.pop(0) if noted.cuts else None])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    noted.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield noted
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
