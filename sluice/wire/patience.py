"""Retries for a bounded time: a server that has just started, a stream without a leader."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def patiently(
    attempt: Callable[[], Awaitable[T]],
    passing: tuple[type[Exception], ...],
    *,
    bound_s: float,
    wait_s: float,
) -> T:
    """Return the result of `attempt`; repeat it `wait_s` seconds after it raised one of `passing`.

    After `bound_s` seconds its error is raised; an attempt that is under way then may take its own time.
    """
    give_up_at = time.monotonic() + bound_s
    while True:
        try:
            return await attempt()
        except passing:
            if time.monotonic() + wait_s > give_up_at:
                raise
        await asyncio.sleep(wait_s)
