"""Who is told of the end of a job: each event once, by one process, also when a process ends on the way.

The record says which event was told, and until when a process has the time to tell the next one. All processes look at
all records that change, and at the others every now and then.
"""

import asyncio
import logging

from jobs.store import JobStore
from jobs.uploads import Outside
from jobs.webhooks import EVENTS, Event, event_of
from sluice.errors import SluiceError
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.wire.clock import unix_ms

TELL_MS = 900_000
"""The time that a process has for an event, all tries included."""

_log = logging.getLogger(__name__)


class Claimed(Exception):
    """Another process tells the event, or it was told."""


def pending(record: JobRecord, now_ms: int) -> Event | None:
    """The event of which nobody has told, and which nobody is about to tell."""
    job = record.job
    if not job.spec.webhook.url or job.state not in EVENTS or job.closing:
        return None
    if now_ms < record.telling_until_unix_ms:
        return None
    event = event_of(job, record.epoch)
    return event if event is not None and event.id != record.told_event_id else None


class Notifier:
    """Tells the events of one process's turn."""

    def __init__(self, store: JobStore, outside: Outside) -> None:
        self._store = store
        self._outside = outside
        self._telling: dict[str, asyncio.Task[None]] = {}

    def look(self, record: JobRecord) -> None:
        """Begins to tell what is to be told of a job."""
        job = record.job.id
        if job not in self._telling and pending(record, unix_ms()) is not None:
            task = asyncio.create_task(self._tell(job), name=f"webhook of {job}")
            self._telling[job] = task
            task.add_done_callback(lambda _: self._telling.pop(job, None))

    async def close(self) -> None:
        """Leaves what was not received to other processes, after `TELL_MS`."""
        for task in self._telling.values():
            task.cancel()
        await asyncio.gather(*self._telling.values(), return_exceptions=True)

    async def _tell(self, job: str) -> None:
        try:
            record = await self._store.change(job, _claim)
            event = event_of(record.job, record.epoch)
            assert event is not None
            await self._outside.send(record.job.tenant, record.job.spec.webhook, event)
            await self._store.change(job, lambda fresh: _told(fresh, event))
        except Claimed:
            return
        except SluiceError as error:
            _log.warning("the webhook of job %s waits: %s", job, error)


def _claim(record: JobRecord) -> None:
    now_ms = unix_ms()
    if pending(record, now_ms) is None:
        raise Claimed
    record.telling_until_unix_ms = now_ms + TELL_MS


def _told(record: JobRecord, event: Event) -> None:
    record.told_event_id, record.telling_until_unix_ms = event.id, 0
