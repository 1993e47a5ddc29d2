"""Webhooks about the end of a job: signed by the Standard Webhooks specification, with OpenAI's event names.

One process at a time sends an event: the record of its job says which event was sent, and until when a
process has the time to send the next one. If that process is lost, another one sends the same event
again. All processes watch all records that change, and scan the others now and then.

The receiver checks `webhook-signature` with the secret of the job, and ignores an old
`webhook-timestamp` and a `webhook-id` that it has seen. A status from 200 to 299 acknowledges the
event; otherwise it is sent again.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from jobs.core.leases import OVER
from jobs.outbound import Outbound
from jobs.store import JobStore
from sluice.errors import InvalidRequest, SluiceError
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import ms_of, unix_ms
from sluice.wire.enums import word_of

FIELD: Final = "spec.webhook.url"
SECRET_CHARS_MIN: Final = 16
"""Shortest secret."""
WAITS_S: Final = (1.0, 5.0, 30.0, 120.0, 600.0)
"""Waits before each retry in seconds, each drawn from its upper half."""

NOTIFY_MS: Final = 900_000
"""Time that a process has to send an event with all retries, in milliseconds."""

_GONE: Final = 410
_PREFIX: Final = "whsec_"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """An event to send. The same event has the same id however often it is sent."""

    id: str
    body: bytes

    def headers(self, secret: str, now_s: int) -> dict[str, str]:
        """Return the headers of a try at `now_s`, in seconds since the Unix epoch."""
        signed = b".".join((self.id.encode(), str(now_s).encode(), self.body))
        digest = hmac.new(key_of(secret), signed, hashlib.sha256).digest()
        return {
            "Content-Type": "application/json",
            "User-Agent": "sluice-webhooks/1",
            "webhook-id": self.id,
            "webhook-timestamp": str(now_s),
            "webhook-signature": "v1," + base64.b64encode(digest).decode(),
        }


def key_of(secret: str) -> bytes:
    """Return the key in a secret: base64 after "whsec_", else its bytes.

    Raises:
        InvalidRequest: it is too short, or no base64.
    """
    if len(secret) < SECRET_CHARS_MIN:
        raise InvalidRequest.of(
            "spec.webhook.secret", f"has fewer than {SECRET_CHARS_MIN} characters"
        )
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except ValueError as error:
        raise InvalidRequest.of(
            "spec.webhook.secret",
            "not base64 after whsec_; send whsec_ with base64, or another text",
        ) from error


def event_of(job: pb.Job, changes: int = 0) -> Event | None:
    """Return the event of the state of a job; None if the state has none.

    Args:
        job: the job.
        changes: distinguishes times that a job entered one state, for example its pauses.
    """
    if job.state not in OVER and job.state != pb.JOB_STATE_PAUSED:
        return None
    state = word_of(pb.JobState, job.state)
    at_ms = ms_of(job.state_time) or ms_of(job.end_time) or ms_of(job.create_time)
    identity = f"{job.id}.{job.state}.{changes}.{job.end_time.seconds}"
    event_id = "evt_" + hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    progress = job.progress
    data = {
        "id": job.id,
        "name": job.spec.name,
        "state": state,
        "reason": job.reason,
        "succeeded": progress.succeeded,
        "dead": progress.dead,
        "total": progress.total,
        "cost": progress.cost,
    }
    described = {
        "id": event_id,
        "object": "event",
        "type": f"batch.{state}",  # OpenAI's names, and "batch.paused", which it does not have
        "created_at": int(at_ms // 1000),  # of the state, so that retries send the same body
        "data": data,
    }
    return Event(event_id, json.dumps(described).encode())


def check(webhook: pb.JobWebhook, outbound: Outbound) -> None:
    """Check a webhook when its job is created. Blocks while its name is resolved.

    Raises:
        InvalidRequest: it may not be called, or its secret is malformed.
        TransportUnavailable: its name cannot be resolved now.
    """
    key_of(webhook.secret)
    outbound.check(webhook.url, FIELD)


PostWebhook = Callable[[str, str, Mapping[str, str], bytes], Awaitable[int]]
"""Sends headers and a body to the URL of a tenant's webhook; returns the status, raises SluiceError."""


async def send(
    job: pb.Job,
    event: Event,
    post: PostWebhook,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> bool:
    """Send an event until it is acknowledged, for about 10 minutes; return whether it was.

    Logs failures and raises nothing.

    Args:
        job: has the webhook.
        event: the event.
        post: sends it once.
        sleep: waits for this many seconds.
    """
    webhook = job.spec.webhook
    for wait_s in (*WAITS_S, None):
        try:
            headers = event.headers(webhook.secret, unix_ms() // 1000)
            status = await post(job.tenant, webhook.url, headers, event.body)
            if 200 <= status < 300:
                return True
            failed = f"status {status}"
            if status == _GONE:  # Standard Webhooks: the receiver wants no more
                wait_s = None
        except SluiceError as error:
            failed = str(error)
        if wait_s is None:
            break
        logger.info("webhook event %s was not delivered, retrying: %s", event.id, failed)
        await sleep(wait_s * (0.5 + random.random() / 2))
    logger.warning("webhook event %s was not delivered, giving up: %s", event.id, failed)
    return False


def pending(record: JobRecord) -> Event | None:
    """Return the event of a job that was not sent, and that nobody is sending; None: there is none."""
    job = record.job
    if not job.spec.webhook.url or job.closing or unix_ms() < record.notifying_until_unix_ms:
        return None
    event = event_of(job, record.epoch)
    return event if event is not None and event.id != record.notified_event_id else None


class _SentElsewhere(Exception):
    """Another process sends the event, or it was sent."""


async def notify(store: JobStore, job: str, post: PostWebhook) -> None:
    """Send the event of a job, unless another process sends it. Log failures and raise nothing."""
    claimed: list[Event] = []

    def claim(record: JobRecord) -> None:
        if (event := pending(record)) is None:
            raise _SentElsewhere
        claimed[:] = [event]
        record.notifying_until_unix_ms = unix_ms() + NOTIFY_MS

    def note(record: JobRecord) -> None:
        record.notified_event_id, record.notifying_until_unix_ms = claimed[0].id, 0

    try:
        record = await store.change(job, claim)
        await send(record.job, claimed[0], post)
        await store.change(job, note)
    except _SentElsewhere:
        return
    except SluiceError as error:
        logger.warning("webhook of job %s was delayed: %s", job, error)
