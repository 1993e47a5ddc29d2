"""The names of models are read once for all who ask at about the same time."""

import asyncio

import pytest

from jobs import app
from jobs.app import ModelNames


class Source:
    def __init__(self) -> None:
        self.reads = 0
        self.fails = False

    async def read(self) -> set[str]:
        self.reads += 1
        await asyncio.sleep(0)
        if self.fails:
            raise ConnectionError
        return {f"model-{number}" for number in range(self.reads)}


async def test_those_who_ask_at_the_same_time_share_a_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source()
    names = ModelNames(source.read)
    assert await asyncio.gather(*(names() for _ in range(100))) == [{"model-0"}] * 100
    assert await names({"model-0"}) == {"model-0"}
    assert await names({"model-1"}) == {"model-0", "model-1"}, "it may have come just now"
    monkeypatch.setattr(app, "KEEP_S", 0.0)
    assert len(await names()) == 3


async def test_those_who_ask_for_an_unknown_one_share_a_reading() -> None:
    source = Source()
    names = ModelNames(source.read)
    await names()
    found = await asyncio.gather(*(names({"unknown"}) for _ in range(100)))
    assert all("unknown" not in one for one in found)
    assert source.reads <= 3


async def test_a_reading_that_failed_is_not_kept() -> None:
    source = Source()
    names = ModelNames(source.read)
    source.fails = True
    with pytest.raises(ConnectionError):
        await names()
    source.fails = False
    assert len(await names()) == 2


async def test_who_is_cancelled_takes_the_reading_from_nobody() -> None:
    source = Source()
    names = ModelNames(source.read)
    first, second = (asyncio.ensure_future(names()) for _ in "12")
    await asyncio.sleep(0)
    first.cancel()
    assert "model-0" in await second
