"""What a gateway says, read once for all jobs that ask for it at about the same time."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

KEEP_S: Final = 1.0

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """What ``read`` gave at most `KEEP_S` ago: the calls of a thousand jobs cost the mesh no more than those of one."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self._read = read
        self._begun_at = float("-inf")
        self._reading: asyncio.Future[_T] | None = None

    async def get(self, *, fresh: bool = False) -> _T:
        """It; with ``fresh`` it is read now. Raises what ``read`` does."""
        now, last = time.monotonic(), self._reading
        old = last is None or (last.done() and (now - self._begun_at >= KEEP_S or _failed(last)))
        if last is None or old or fresh:
            self._begun_at = now
            last = self._reading = asyncio.ensure_future(self._read())
        return await asyncio.shield(last)


def _failed(reading: "asyncio.Future[_T]") -> bool:
    return reading.cancelled() or reading.exception() is not None
