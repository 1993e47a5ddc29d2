"""The work queue on NATS: tasks of each class in the order they came, until the batcher has room for them."""

from collections import deque
from collections.abc import Iterator, Mapping

from sluice.wire.subjects import CLASSES


class Store(Mapping[str, int]):
    """Requests by class that no batcher has taken; as a mapping, how many."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[str]] = {name: deque() for name in CLASSES}

    def __getitem__(self, priority_class: str) -> int:
        return len(self._waiting[priority_class])

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, priority_class: str, request_id: str) -> None:
        """A task is published."""
        self._waiting[priority_class].append(request_id)

    def take(self, priority_class: str, most: int) -> Iterator[str]:
        """The next ones, the first first."""
        waiting = self._waiting[priority_class]
        for _ in range(min(most, len(waiting))):
            yield waiting.popleft()
