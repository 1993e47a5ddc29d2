"""Complete answers with an idempotency key, kept for a while so that a repeated request gets the same answer."""

from collections import OrderedDict
from dataclasses import dataclass

from gateway.streaming.delivery import Delivery
from gateway.streaming.lifecycle import StreamSpec
from sluice.v1.inference_pb2 import Finished, GenerateResponse


@dataclass(frozen=True)
class Replay:
    """A complete answer; holds what callers may see of it and nothing of the call that computed it."""

    spec: StreamSpec
    finished: Finished
    escalation_reason: str
    """Why another model took over, if one did."""
    first_token_s: float | None
    """From the arrival of the first call to its first token."""
    delivery: Delivery

    def events(self, index: int, model: str) -> list[GenerateResponse]:
        """All events after the first one, for a caller who holds ``index`` tokens of ``model``."""
        return self.delivery.replay(index, model, self.finished)


class ReplayCache:
    """Replays by idempotency key, bounded in number and age; the oldest are evicted first."""

    def __init__(self, entries: int, keep_s: float) -> None:
        self._limit = entries
        self._keep_s = keep_s
        self._entries: OrderedDict[str, tuple[Replay, float]] = OrderedDict()
        """With the time at which each expires."""

    def put(self, key: str, replay: Replay, now: float) -> None:
        """Keeps ``replay`` under ``key``."""
        self._entries.pop(key, None)
        self._entries[key] = replay, now + self._keep_s
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: str, now: float) -> Replay | None:
        """The answer kept under ``key``, or None."""
        replay, expires_at = self._entries.get(key, (None, 0.0))
        return replay if expires_at > now else None

    def expire(self, now: float) -> None:
        """Evicts what is too old. All are kept equally long, so the oldest entry expires first."""
        while self._entries and next(iter(self._entries.values()))[1] <= now:
            self._entries.popitem(last=False)
