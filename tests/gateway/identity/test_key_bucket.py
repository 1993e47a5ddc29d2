"""How often the keys are asked for."""

import asyncio

import pytest

from gateway.identity import key_bucket
from gateway.identity.key_bucket import KeyBucket
from sluice.errors import TransportUnavailable


async def test_keys_are_asked_for_each_second_also_after_nats_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket, pause = KeyBucket(1, lambda: None), asyncio.sleep
    happened = list[object]()

    async def sleep(delay_s: float) -> None:
        happened.append(delay_s)
        await pause(0)

    async def refresh() -> None:
        happened.append("asked")
        if len(happened) < 5:
            raise TransportUnavailable("away")
        if len(happened) > 7:
            raise asyncio.CancelledError

    monkeypatch.setattr(key_bucket.asyncio, "sleep", sleep)
    bucket.refresh = refresh  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await bucket.run()
    assert happened == [1.0, "asked"] * 4
