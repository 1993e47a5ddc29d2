"""Webhooks: the signature, the events, and that they are sent until they are received."""

import asyncio
import base64
import hashlib
import hmac
import json
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import webhooks
from jobs.closing import FollowUps
from jobs.outbound import Outbound
from jobs.webhooks import Event, check, event_of, key_of, send
from sluice.errors import InvalidRequest
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1 import jobs_pb2 as pb
from tests.jobs.conftest import Receiver
from tests.jobs.processes import BOUND_S

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
LOCAL = Outbound(["127.0.0.1"])


def job(state: "pb.JobState.ValueType" = pb.JOB_STATE_COMPLETED) -> pb.Job:
    found = pb.Job(id="job-1", state=state, progress=pb.JobProgress(total=3, succeeded=2, dead=1))
    found.end_time.seconds = 1_700_000_000
    return found


def test_the_signature_is_that_of_the_published_example() -> None:
    """The example of standardwebhooks and Svix."""
    event = Event("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}')
    headers = event.headers(SECRET, 1614265330)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("secret", ["", "short", "whsec_not base 64!!", "whsec_" + "\u00e9" * 32])
def test_a_secret_that_is_none_is_refused(secret: str) -> None:
    with pytest.raises(InvalidRequest, match="secret"):
        key_of(secret)


async def test_a_process_sends_one_event_of_a_job_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where its turn comes after the time in which no other process may send it."""
    begun, sent = list[str](), asyncio.Event()

    async def notify(_: Any, job_id: str, __: Any) -> None:
        begun.append(job_id)
        await sent.wait()

    monkeypatch.setattr(webhooks, "notify", notify)
    process: Any = SimpleNamespace(store=None, outside=SimpleNamespace(post=None))
    follow_ups, record = FollowUps(process), JobRecord(job=job())
    record.job.spec.webhook.url = "https://example.org"
    for _ in range(3):
        follow_ups.on_record(record)
        await asyncio.sleep(0)
    assert begun == ["job-1"]
    sent.set()
    async with asyncio.timeout(BOUND_S):
        while len(begun) < 2:
            follow_ups.on_record(record)
            await asyncio.sleep(0)
    await follow_ups.close()


def test_events_have_the_names_of_openai() -> None:
    event = event_of(job())
    assert event is not None
    body = json.loads(event.body)
    assert (body["type"], body["object"], body["created_at"]) == (
        "batch.completed",
        "event",
        1_700_000_000,
    )
    assert body["data"]["id"] == "job-1"
    assert (body["data"]["succeeded"], body["data"]["dead"]) == (2, 1)
    names = {json.loads(found.body)["type"] for s in range(8) if (found := event_of(job(s)))}  # type: ignore[arg-type]
    assert {"batch.failed", "batch.cancelled", "batch.expired"} < names
    assert event_of(job(pb.JOB_STATE_RUNNING)) is None
    assert event == event_of(job())
    assert event_of(job(), 1) != event


def test_event_has_the_time_of_its_state() -> None:
    paused = pb.Job(id="job-1", state=pb.JOB_STATE_PAUSED)
    paused.create_time.seconds = 1_700_000_000
    paused.state_time.seconds = 1_700_000_500
    event = event_of(paused)
    assert event is not None
    assert json.loads(event.body)["created_at"] == 1_700_000_500


async def post(_: str, url: str, headers: Any, body: bytes) -> int:
    return await asyncio.to_thread(LOCAL.post, url, headers, body, "url")


def notified(receiver: Receiver) -> pb.Job:
    found = job()
    found.spec.webhook.url, found.spec.webhook.secret = receiver.url, SECRET
    return found


async def test_an_event_is_sent_until_it_is_received(receiver: Receiver) -> None:
    receiver.statuses += [500, 302, 204]
    waits: list[float] = []

    async def note(wait_s: float) -> None:
        waits.append(wait_s)

    event = event_of(job())
    assert event is not None
    assert await send(notified(receiver), event, post, note)
    assert len(receiver.got) == 3
    assert len(waits) == 2
    assert 0.5 <= waits[0] <= 1 < 2.5 <= waits[1] <= 5
    headers, body = receiver.got[0]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(base64.b64decode(SECRET[6:]), signed, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1


@pytest.mark.parametrize(("status", "tries"), [(500, 6), (410, 1)])
async def test_it_ends_at_last(
    receiver: Receiver, status: int, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.statuses += [status] * 6

    async def no_wait(wait_s: float) -> None:
        pass

    assert not await send(notified(receiver), Event("evt_1", b"{}"), post, no_wait)
    assert len(receiver.got) == tries
    assert "evt_1 was not delivered" in caplog.text


def test_a_webhook_is_checked_when_its_job_is_created(receiver: Receiver) -> None:
    check(pb.JobWebhook(url=receiver.url, secret=SECRET), LOCAL)
    with pytest.raises(InvalidRequest, match="private"):
        check(pb.JobWebhook(url=receiver.url, secret=SECRET), Outbound())
    with pytest.raises(InvalidRequest, match="secret"):
        check(pb.JobWebhook(url=receiver.url), LOCAL)
