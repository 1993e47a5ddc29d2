"""How often the keys are asked for."""

import asyncio

import nats
import pytest

from gateway.identity import key_sources
from gateway.identity.authenticator import Authenticator
from gateway.identity.key_sources import KeyBucket
from sluice.errors import TransportUnavailable, Unauthenticated
from sluice.settings import IdentitySettings
from sluice.wire import jetstream
from sluice.wire.api_keys import new_key
from sluice.wire.bucket import Bucket
from tests.gateway.kit.issuer import bearer, make_key


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

    monkeypatch.setattr(key_sources.asyncio, "sleep", sleep)
    bucket.refresh = refresh  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await bucket.run()
    assert happened == [1.0, "asked"] * 4


async def test_that_keys_stay_as_they_were_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, pause = KeyBucket(1, lambda: None), asyncio.sleep
    answers = [False, False, True, False, None]

    async def refresh() -> None:
        answer = answers.pop(0)
        if answer is None:
            raise asyncio.CancelledError
        if not answer:
            raise TransportUnavailable("away")

    async def sleep(_: float) -> None:
        await pause(0)

    monkeypatch.setattr(key_sources.asyncio, "sleep", sleep)
    bucket.refresh = refresh  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await bucket.run()
    assert caplog.text.count("API keys stay as they were") == 2


async def test_keys_are_read_when_they_have_changed(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    changes = list[int]()
    bucket, writer = KeyBucket(1, lambda: changes.append(1)), Bucket(jetstream.API_KEYS)
    await writer.start(client)
    await bucket.start(client)
    assert (bucket.records, len(changes)) == ({}, 1)
    key_id, _ = await make_key(writer, "acme")
    await bucket.refresh()
    await bucket.refresh()
    assert (set(bucket.records), len(changes)) == ({key_id}, 2)
    await client.close()


async def test_before_they_are_read_there_are_none() -> None:
    assert KeyBucket(1, lambda: None).records == {}
    authenticator = Authenticator(IdentitySettings(api_keys=True))
    with pytest.raises(Unauthenticated, match="there is no API key"):
        await authenticator.caller_of(dict(bearer(new_key().text)))
