"""Whose request is looked at next: a burst of bulk requests must not stand before an interactive one at the door.

Inspecting and tokenizing run on the gateway's loop, in the order in which requests came. Less urgent classes are let in
a few at a time, so that a more urgent request finds few of them before it, and not all that came at once.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

AT_ONCE: Final[Mapping[str, int]] = {"standard": 8, "bulk": 2}
"""Requests of a class that are looked at side by side; of others any number."""


class ClassLimiter:
    """The limiter of one gateway."""

    def __init__(self) -> None:
        self._slots = {name: asyncio.Semaphore(count) for name, count in AT_ONCE.items()}

    @asynccontextmanager
    async def slot(self, priority_class: str) -> AsyncIterator[None]:
        """Waits for the turn of a request, in the order of arrival; nothing is awaited when it is given back.

        The caller sets the limit: the request's own deadline.
        """
        limiter = self._slots.get(priority_class)
        if limiter is None:
            yield
            return
        await limiter.acquire()
        try:
            yield
        finally:
            limiter.release()
