"""An OTLP receiver that takes everything and looks at nothing: gRPC, and HTTP for Triton. Prints both ports; ends with
its standard input."""

import asyncio
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import uvloop


class _Taken(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Takes one export."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


class _All(grpc.GenericRpcHandler):
    """Answers each unary call with an empty message."""

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        """Of any method."""
        return grpc.unary_unary_rpc_method_handler(_nothing)


async def _nothing(request: bytes, context: object) -> bytes:
    return b""


async def main() -> None:
    """Serves until standard input ends."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_All(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Taken)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    print(port, http.server_address[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(main())
