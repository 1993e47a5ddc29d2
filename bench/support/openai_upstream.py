"""A server of OpenAI's chat API that answers each request with one token and costs as little as Python can.

`python -m bench.support.openai_upstream` prints its port and ends with its standard input. What proxies add is measured
in front of it.
"""

import asyncio
import json
import sys
from typing import Final, cast

import uvloop

_CHUNK: Final = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "echo"}


def _event(choice: dict[str, object]) -> bytes:
    return f"data: {json.dumps({**_CHUNK, 'choices': [{'index': 0, **choice}]})}\n\n".encode()


EVENTS: Final = (
    _event({"delta": {"role": "assistant", "content": "x"}, "finish_reason": None})
    + _event({"delta": {}, "finish_reason": "length"})
    + b"data: [DONE]\n\n"
)
ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + f"{len(EVENTS):x}\r\n".encode()
    + EVENTS
    + b"\r\n0\r\n\r\n"
)
_LIST: Final = json.dumps({"object": "list", "data": [{"id": "echo", "object": "model"}]}).encode()
MODELS: Final = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(_LIST), _LIST)


class Connection(asyncio.Protocol):
    """One client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._received = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found or len(rest) < _length(head):
            return
        self._received = rest[_length(head) :]
        self._transport.write(MODELS if head.startswith(b"GET") else ANSWER)


def _length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length:")
    return int(rest.partition(b"\r\n")[0] or 0)


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
