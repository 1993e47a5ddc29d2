"""What a gateway says is read once for all who ask at about the same time."""

import asyncio

import pytest

from jobs import recent as module
from jobs.recent import Recent


class Source:
    def __init__(self) -> None:
        self.reads = 0
        self.fails = False

    async def read(self) -> int:
        self.reads += 1
        await asyncio.sleep(0)
        if self.fails:
            raise ConnectionError
        return self.reads


async def test_those_who_ask_at_the_same_time_share_a_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source()
    recent = Recent(source.read)
    assert await asyncio.gather(*(recent.get() for _ in range(100))) == [1] * 100
    assert await recent.get() == 1
    assert await recent.get(fresh=True) == 2
    monkeypatch.setattr(module, "KEEP_S", 0.0)
    assert await recent.get() == 3


async def test_a_reading_that_failed_is_not_kept() -> None:
    source = Source()
    recent = Recent(source.read)
    source.fails = True
    with pytest.raises(ConnectionError):
        await recent.get()
    source.fails = False
    assert await recent.get() == 2


async def test_who_is_cancelled_takes_the_reading_from_nobody() -> None:
    source = Source()
    recent = Recent(source.read)
    first, second = (asyncio.ensure_future(recent.get()) for _ in "12")
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1
