"""Tells an HTTP endpoint about the end of a job: signed as Standard Webhooks says, with OpenAI's event names.

The receiver checks ``webhook-signature`` with the secret of the job, ignores a ``webhook-timestamp`` that is old, and a
``webhook-id`` that it has had. Any answer of 200 to 299 is a receipt; else the event is sent again.
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

from jobs.outbound import Outbound
from sluice.errors import InvalidRequest, SluiceError
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import ms_of, unix_ms
from sluice.wire.enums import word_of

FIELD: Final = "spec.webhook.url"
SECRET_CHARS_MIN: Final = 16
WAITS_S: Final = (1.0, 5.0, 30.0, 120.0, 600.0)
"""Before each further try; each is drawn from its upper half."""

EVENTS: Final[Mapping["pb.JobState.ValueType", str]] = {
    pb.JOB_STATE_COMPLETED: "batch.completed",
    pb.JOB_STATE_FAILED: "batch.failed",
    pb.JOB_STATE_CANCELLED: "batch.cancelled",
    pb.JOB_STATE_EXPIRED: "batch.expired",
    pb.JOB_STATE_PAUSED: "batch.paused",
}
"""OpenAI's names; it has no "batch.paused"."""

_GONE: Final = 410
_PREFIX: Final = "whsec_"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """What is sent. The same event has the same id however often it is sent."""

    id: str
    body: bytes

    def headers(self, secret: str, now_s: int) -> dict[str, str]:
        """The headers of a try at ``now_s``, seconds since the Unix epoch."""
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
    """The key in a secret: base64 after "whsec_", else its bytes.

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
        raise InvalidRequest.of("spec.webhook.secret", "is no base64 after whsec_") from error


def event_of(job: pb.Job, changes: int = 0) -> Event | None:
    """The event of the state that ``job`` is in; None where nobody is told.

    Args:
        changes: tells apart the times that a job came into one state, for example its pauses.
    """
    name = EVENTS.get(job.state)
    if name is None:
        return None
    at_ms = ms_of(job.state_time) or ms_of(job.end_time) or ms_of(job.create_time)
    identity = f"{job.id}.{job.state}.{changes}.{job.end_time.seconds}"
    event_id = "evt_" + hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    progress = job.progress
    data = {
        "id": job.id,
        "name": job.spec.name,
        "state": word_of(pb.JobState, job.state),
        "reason": job.reason,
        "succeeded": progress.succeeded,
        "dead": progress.dead,
        "total": progress.total,
        "cost": progress.cost,
    }
    described = {
        "id": event_id,
        "object": "event",
        "type": name,
        "created_at": int(at_ms // 1000),
        "data": data,
    }
    return Event(event_id, json.dumps(described).encode())


def check(webhook: pb.JobWebhook, outbound: Outbound) -> None:
    """Checks a webhook when its job is created. Blocks while its name is resolved.

    Raises:
        InvalidRequest: it may not be called, or its secret is none.
    """
    key_of(webhook.secret)
    outbound.check(webhook.url, FIELD)


async def send(
    webhook: pb.JobWebhook,
    event: Event,
    post: Callable[[Mapping[str, str]], Awaitable[int]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> bool:
    """Sends ``event`` until it is received, for about 10 minutes; whether it was. Logs what fails; raises nothing.

    ``post``: sends it once with these headers; returns the status, raises SluiceError.
    """
    for wait_s in (*WAITS_S, None):
        try:
            headers = event.headers(webhook.secret, unix_ms() // 1000)
            status = await post(headers)
            if 200 <= status < 300:
                return True
            failed = f"status {status}"
            if status == _GONE:  # Standard Webhooks: the receiver wants no more
                wait_s = None
        except SluiceError as error:
            failed = str(error)
        if wait_s is None:
            break
        _log.info("webhook %s was not received, and is sent again: %s", event.id, failed)
        await sleep(wait_s * (0.5 + random.random() / 2))
    _log.warning("webhook %s was not received: %s", event.id, failed)
    return False
