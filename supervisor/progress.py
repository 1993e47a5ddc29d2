"""Tell the user what a start or stop waits for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

_T = TypeVar("_T")

Progress = Callable[[str], None]
"""Takes one step of the start of a mesh, in words."""
EVERY_S: Final = 5.0
"""How often a wait is told, in seconds."""


async def tell_while_waiting(
    ready: Awaitable[_T],
    names: Callable[[], str],
    on_progress: Progress,
    every_s: float = EVERY_S,
) -> _T:
    """Wait for `ready`; tell every `every_s` seconds which `names` it still takes, and for how long."""
    begun = time.monotonic()

    async def tell() -> None:
        while True:
            await asyncio.sleep(every_s)
            on_progress(f"waiting for {names()} ({time.monotonic() - begun:.0f} s)")

    telling = asyncio.ensure_future(tell())
    try:
        return await ready
    finally:
        telling.cancel()
