"""What a class finds in a worker whose engine gives it the slots of less urgent rows.

Such a row is not lost: it waits inside the engine and goes on when a slot is free again. So an urgent row need not wait
for a long answer of another class to end, and no slot has to stand empty for it. Some less urgent rows keep their slots
in any case: those that gave way come back through them, however many urgent ones there are.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from batcher.core.batches import Batch

KEPT_SHARE: Final = 16
"""One slot of so many, and at least one, stays with less urgent rows."""


class Use(NamedTuple):
    """What rows of one class take of a worker, those on their way to it included; tokens."""

    rows: int = 0
    waiting_tokens: int = 0
    """To be computed before their next tokens."""
    cache_tokens: int = 0
    """In the cache, or promised to them."""


class Room(NamedTuple):
    """What a class finds."""

    free_rows: int
    free_tokens: float
    waiting_tokens: int
    """Of rows that are computed before those of the class, or with them."""

    def after(self, batch: Batch) -> "Room":
        """As it is with ``batch`` on its way, whatever the class of its rows."""
        return Room(
            self.free_rows - len(batch.rows),
            self.free_tokens - batch.cache_tokens,
            self.waiting_tokens + batch.tokens,
        )


def rooms(uses: Sequence[Use], slots: int, places: int, cache_tokens: float) -> tuple[Room, ...]:
    """The room of each class but the least urgent one; none where nobody can give way to it.

    Args:
        uses: by class, the most urgent first.
        slots: rows that are computed at once.
        places: rows that the worker takes in all.
        cache_tokens: that are in no use; infinite: only rows limit it.
    """
    found = []
    left = places - sum(use.rows for use in uses)
    for rank in range(1, len(uses)):
        before, below = uses[:rank], uses[rank:]
        giving_way = sum(use.rows for use in below)
        kept = -(-slots // KEPT_SHARE)
        taken = sum(use.rows for use in before)
        free = min(slots - taken - kept, left) if giving_way > kept else 0
        found.append(
            Room(
                max(0, free),
                cache_tokens + sum(use.cache_tokens for use in below),
                sum(use.waiting_tokens for use in before),
            )
        )
    return tuple(found)
