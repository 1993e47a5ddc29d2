"""Webhook notifications: each event of a job is sent once, by one process, even if a process is lost.

The record says which event was sent, and until when a process has the time to send the next one.
All processes watch all records that change, and scan the others now and then.
"""

import logging

from jobs.store import JobStore
from jobs.uploads import ExternalAccess
from jobs.webhooks import EVENTS, Event, event_of
from sluice.background import BackgroundTasks
from sluice.errors import SluiceError
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.wire.clock import unix_ms

NOTIFY_MS = 900_000
"""Time that a process has to send an event with all retries, in milliseconds."""

logger = logging.getLogger(__name__)


class ClaimedElsewhere(Exception):
    """Another process sends the event, or it was sent."""


def pending(record: JobRecord, now_ms: int) -> Event | None:
    """Return the event that was not sent, and that nobody is sending."""
    job = record.job
    if not job.spec.webhook.url or job.state not in EVENTS or job.closing:
        return None
    if now_ms < record.notifying_until_unix_ms:
        return None
    event = event_of(job, record.epoch)
    return event if event is not None and event.id != record.notified_event_id else None


class Notifier:
    """Sends the events that this process claims."""

    def __init__(self, store: JobStore, outside: ExternalAccess) -> None:
        self._store = store
        self._outside = outside
        self._notifying: set[str] = set()
        self._tasks = BackgroundTasks()

    def on_record(self, record: JobRecord) -> None:
        """Start to send the event of a record, if there is one."""
        job = record.job.id
        if job not in self._notifying and pending(record, unix_ms()) is not None:
            self._notifying.add(job)
            self._tasks.spawn(self._notify(job))

    async def close(self) -> None:
        """Leave undelivered events to other processes, after `NOTIFY_MS`."""
        await self._tasks.close()

    async def _notify(self, job: str) -> None:
        try:
            record = await self._store.change(job, _claim)
            event = event_of(record.job, record.epoch)
            assert event is not None
            await self._outside.send(record.job.tenant, record.job.spec.webhook, event)
            await self._store.change(job, lambda fresh: _sample(fresh, event))
        except ClaimedElsewhere:
            return
        except SluiceError as error:
            logger.warning("webhook of job %s was delayed: %s", job, error)
        finally:
            self._notifying.discard(job)


def _claim(record: JobRecord) -> None:
    now_ms = unix_ms()
    if pending(record, now_ms) is None:
        raise ClaimedElsewhere
    record.notifying_until_unix_ms = now_ms + NOTIFY_MS


def _sample(record: JobRecord, event: Event) -> None:
    record.notified_event_id, record.notifying_until_unix_ms = event.id, 0
