"""Callers of /v1/chat/completions that cost little: plain sockets with keep-alive, and hardly any parsing."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any, Final

CALL_S: Final = 60.0
DONE: Final = b"data: [DONE]\n\n"
END: Final = b"0\r\n\r\n"
"""Of a chunked body."""


async def stream_chats(address: str, body: Mapping[str, Any], callers: int, requests: int) -> None:
    """``requests`` streamed answers to ``body`` for ``callers``, each with a connection of its own."""
    data = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    request, left = head.encode() + data, itertools.count(requests, -1)

    async def caller() -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            while next(left) > 0:
                writer.write(request)
                async with asyncio.timeout(CALL_S):
                    answer = await reader.readuntil(END)
                assert DONE in answer, answer
        finally:
            writer.close()
            await writer.wait_closed()

    await asyncio.gather(*(caller() for _ in range(callers)))
