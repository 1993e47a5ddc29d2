"""Ends that no gateway has confirmed yet: when to send each again, and when to ask instead."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

TRIES: Final = 6
"""The first sending and five more."""


class Finals:
    """Unconfirmed ends by request. All wait equally long, so the order of entry is the order of time."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._waiting: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def sent(self, request_id: str, now: float, tries: int = 1) -> None:
        """An end went out for the ``tries``-th time."""
        self._waiting[request_id] = (now + self._retry_s, tries)
        self._waiting.move_to_end(request_id)

    def unanswered(self, request_id: str, now: float) -> None:
        """The gateway did not answer: ask it again."""
        self.sent(request_id, now, TRIES)

    def forget(self, request_id: str) -> None:
        """Confirmed, or given up; unknown ones are ignored."""
        self._waiting.pop(request_id, None)

    def due(self, now: float) -> Iterator[tuple[str, int | None]]:
        """Ends that waited long enough, each forgotten, and the number of the next try; None: it is time to ask."""
        while self._waiting:
            request_id, (at, tries) = next(iter(self._waiting.items()))
            if at > now:
                return
            del self._waiting[request_id]
            yield request_id, tries + 1 if tries < TRIES else None

    def next_at(self) -> float | None:
        """When `due` has something."""
        return next(iter(self._waiting.values()))[0] if self._waiting else None
