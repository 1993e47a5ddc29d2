"""A server that does nothing, as the floor of `tests.robustness.connections`: it answers 401 once, and drops the rest.

python tests/robustness/bare_server.py PORT [FOLDER]    a folder of certificates: connections are encrypted
"""

import asyncio
import ssl
import sys
from pathlib import Path
from typing import Any, Final

import grpc
import uvloop
from typing_extensions import override

ANSWER: Final = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"


class Bare(asyncio.Protocol):
    """One connection."""

    @override
    def connection_made(self, transport: Any) -> None:
        self._transport, self._is_answered = transport, False

    @override
    def data_received(self, data: bytes) -> None:
        if not self._is_answered:
            self._is_answered = True
            self._transport.write(ANSWER)


async def refuse(_: Any, context: Any) -> None:
    """Refuse a call of any method."""
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "")


class AnyMethod(grpc.GenericRpcHandler):
    """Has a handler for every method."""

    @override
    def service(self, _: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(refuse)


async def main(port: int, grpc_port: int, folder: Path | None) -> None:
    """Serve until the process ends."""
    context = None
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    calls = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    calls.add_generic_rpc_handlers((AnyMethod(),))
    calls.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await calls.start()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Bare, "127.0.0.1", port, ssl=context, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    http, grpc_at, *folders = sys.argv[1:]
    uvloop.run(main(int(http), int(grpc_at), Path(folders[0]) if folders else None))
