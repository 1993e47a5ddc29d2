"""Messages of a stream that are there together travel as one: each costs both ends a turn of their loops."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, Protocol, TypeVar

GROUP_BYTES_MAX: Final = 256 * 1024
"""Largest message with others in it, in bytes. One that is larger by itself goes alone."""


class _Group(Protocol):
    @property
    def more(self) -> Any: ...

    def ByteSize(self) -> int: ...


_M = TypeVar("_M", bound=_Group)


def next_group(waiting: deque[_M]) -> _M:
    """Take the first of the pending messages, with those that follow it in its field `more`."""
    first = waiting.popleft()
    left = GROUP_BYTES_MAX - first.ByteSize()
    while waiting and (left := left - waiting[0].ByteSize()) >= 0:
        first.more.append(waiting.popleft())
    return first


class GroupWriter(Generic[_M]):
    """Writes to a stream that takes one message at a time."""

    def __init__(self, write: Callable[[_M], Awaitable[object]]) -> None:
        self._write = write
        self._turn = asyncio.Lock()
        self._waiting: deque[_M] = deque()

    async def write(self, message: _M) -> None:
        """Write a message, with others in it or as part of another one; return after that has been written."""
        self._waiting.append(message)
        await asyncio.sleep(0)  # those that are made in this turn of the loop go with it
        async with self._turn:
            if self._waiting:
                await self._write(next_group(self._waiting))
