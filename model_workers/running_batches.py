"""Counts the batches of which a worker still has a sequence, for the batchers' limit on them."""

from collections import Counter


class RunningBatches:
    """The batches of all batchers, by id, while one of their sequences is in the engine."""

    def __init__(self) -> None:
        self._batch_of: dict[str, str] = {}
        self._sequences: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return how many batches have a sequence in the engine."""
        return len(self._sequences)

    def enter(self, request_id: str, batch_id: str) -> None:
        """Count a sequence that the engine has accepted; it replaces one of an earlier attempt."""
        self.leave(request_id)
        self._batch_of[request_id] = batch_id
        self._sequences[batch_id] += 1

    def leave(self, request_id: str) -> None:
        """Discount a sequence that has left the engine; unknown ones are ignored."""
        batch_id = self._batch_of.pop(request_id, None)
        if batch_id is None:
            return
        self._sequences[batch_id] -= 1
        if not self._sequences[batch_id]:
            del self._sequences[batch_id]
