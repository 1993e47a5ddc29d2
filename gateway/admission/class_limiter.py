"""Limits how many requests of a class are inspected and tokenized at the same time.

Both run on the gateway's event loop, in order of arrival. The limits of less urgent classes keep a burst of bulk
requests from delaying an interactive request that arrives after it.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

CONCURRENT_MAX: Final[Mapping[str, int]] = {"standard": 8, "bulk": 2}
"""Requests by class; interactive ones are not limited."""


class ClassLimiter:
    """The slots of one gateway."""

    def __init__(self) -> None:
        self._slots = {name: asyncio.Semaphore(count) for name, count in CONCURRENT_MAX.items()}

    def slot(self, priority_class: str) -> AbstractAsyncContextManager[None]:
        """Holds a slot of the class; slots are given in order of arrival. The caller limits the wait."""
        return self._slots.get(priority_class, nullcontext())
