"""Which batchers share the workers of a model, as their reports say, and what share is ours."""

from dataclasses import dataclass
from typing import Final

from sluice.internal.v1.control_pb2 import BatcherReport

EXPIRY_S: Final = 3.5
"""A batcher that was silent for this long is forgotten, seconds."""


@dataclass(frozen=True, slots=True)
class Share:
    """With whom a worker is shared."""

    batchers: int = 1
    """All that send to it, this one included."""
    demanding: int = 0
    """Others in which tasks wait."""

    def of(self, slots: int, free: int, used: int, unanswered: int) -> int:
        """Rows that may be sent to a worker now.

        What was free by its last word is parted among all, rounded up, so all of them together send at most
        ``batchers - 1`` rows too many on one word; they wait in the worker. One that has an older word may add its
        part of what was free then. While others have tasks that wait nobody takes more slots than an equal part: they
        hear of a free slot later than the one whose row left it.

        Args:
            slots: of the worker.
            free: of these, by its last word.
            used: rows of ours in it, or on their way.
            unanswered: of these, rows on their way, which that word does not know.
        """
        room = -(-free // self.batchers) - unanswered
        if self.demanding:
            room = min(room, -(-slots // (1 + self.demanding)) - used)
        return max(0, room)


@dataclass(frozen=True, slots=True)
class _Peer:
    queued: dict[str, int]
    """Tasks that wait, by each model that it has a worker for."""
    expires_at: float


class Peers:
    """The batchers beside this one that were heard lately; time is an argument, monotonic seconds."""

    def __init__(self, batcher: str) -> None:
        self._batcher = batcher
        self._peers: dict[str, _Peer] = {}

    def take(self, report: BatcherReport, now: float) -> None:
        """A batcher's report; our own come too."""
        if report.batcher == self._batcher:
            return
        self._peers.pop(report.batcher, None)
        if not report.leaving:
            queued = {model.model: model.queued for model in report.models if model.workers}
            self._peers[report.batcher] = _Peer(queued, now + EXPIRY_S)

    def share(self, model: str, now: float) -> Share:
        """With whom the workers of ``model`` are shared."""
        for batcher in [b for b, peer in self._peers.items() if peer.expires_at <= now]:
            del self._peers[batcher]
        queued = [peer.queued[model] for peer in self._peers.values() if model in peer.queued]
        return Share(1 + len(queued), sum(count > 0 for count in queued))
