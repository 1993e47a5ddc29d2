"""What tests of commands share: how a run looks, and the command as a process."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

COMMAND: Final = (sys.executable, "-m", "cli")
BOUND_S: Final = 60.0


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


Cli = Callable[..., Awaitable[Ran]]


@asynccontextmanager
async def process(address: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command as a process that asks `address`; killed when the block ends."""
    started = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "SLUICE_ADDRESS": address},
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


@asynccontextmanager
async def served(add: Callable[[Any, grpc.aio.Server], None], service: Any) -> AsyncIterator[str]:
    """Serve `service`, which `add` registers, and yield its address."""
    server = grpc.aio.server()
    add(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
