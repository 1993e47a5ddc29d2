"""Counts the batches of which a worker still holds a row, for the batchers' limit on them."""

from collections import Counter


class RunningBatches:
    """The batches of all batchers, by their ids, while a row of them is in the engine."""

    def __init__(self) -> None:
        self._batch_of: dict[str, str] = {}
        self._rows: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return how many batches have a row in the engine."""
        return len(self._rows)

    def enter(self, request_id: str, batch_id: str) -> None:
        """Count a row that the engine has taken; it replaces one of an earlier attempt."""
        self.leave(request_id)
        self._batch_of[request_id] = batch_id
        self._rows[batch_id] += 1

    def leave(self, request_id: str) -> None:
        """Count a row out that has left the engine; one that is not there is ignored."""
        batch_id = self._batch_of.pop(request_id, None)
        if batch_id is None:
            return
        self._rows[batch_id] -= 1
        if not self._rows[batch_id]:
            del self._rows[batch_id]
