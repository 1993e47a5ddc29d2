"""Finished answers with an idempotency key, kept for a while so that a repeated request gets the same answer."""

from collections import OrderedDict
from dataclasses import dataclass

from gateway.streaming.stream import Stream


@dataclass(frozen=True)
class _Entry:
    stream: Stream
    expires_at: float


class Replays:
    """A bounded, ageing store; the oldest leave first."""

    def __init__(self, entries: int, keep_s: float) -> None:
        self._limit = entries
        self._keep_s = keep_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, stream: Stream, now: float) -> None:
        """Keeps ``stream``, which is finished and has a key."""
        self._entries.pop(stream.ticket.key, None)
        self._entries[stream.ticket.key] = _Entry(stream, now + self._keep_s)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: str, now: float) -> Stream | None:
        """The answer kept under ``key``, or None."""
        entry = self._entries.get(key)
        return entry.stream if entry is not None and entry.expires_at > now else None

    def expire(self, now: float) -> None:
        """Forgets what is too old. All are kept equally long, so the oldest entry is the first to go."""
        while self._entries and next(iter(self._entries.values())).expires_at <= now:
            self._entries.popitem(last=False)
