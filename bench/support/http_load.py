"""Callers of /v1/chat/completions that cost little: plain sockets with keep-alive, and hardly any parsing."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Final

CALL_S: Final = 60.0
DONE: Final = b"data: [DONE]\n\n"
END: Final = b"0\r\n\r\n"
"""Of a chunked body."""


async def stream_chats(address: str, model: str, prompts: Sequence[str], callers: int) -> float:
    """A streamed answer of one token to each of ``prompts``; callers have a connection each. Seconds."""
    left, begun = iter([_request(address, model, text) for text in prompts]), time.perf_counter()

    async def caller() -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            for request in left:
                writer.write(request)
                async with asyncio.timeout(CALL_S):
                    answer = await reader.readuntil(END)
                assert DONE in answer, answer
        finally:
            writer.close()
            await writer.wait_closed()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return time.perf_counter() - begun


def _request(address: str, model: str, text: str) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    data = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
