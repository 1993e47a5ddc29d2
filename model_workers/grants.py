"""How many rows each batcher may send. The worker decides: it alone knows its slots, its cache and all batchers.

- A grant is a total: the rows that a batcher may have sent over its channel in all, those that left the engine
  included; by class, most urgent first. A row of a class may be sent while fewer were. So a grant that is late or comes
  twice makes no room, and rows on their way need no count of their own. The tokens of the KV cache that rows will hold
  at their end are granted in the same way.
- A class has the slots that are free, and those of less urgent rows, where the engine preempts them. One slot of
  `KEPT_SHARE`, and at least one, stays with these: preempted rows continue in it.
- Room is divided among the batchers in which rows of the class or a more urgent one wait, so that all have as many rows
  here, and each gets as many as wait there at most; what is left, among all. So what one has and does not use, and may
  send on an old word while another has it too, is its part at most.
- A batcher in which rows wait says so again with each of its heartbeats. After `SILENT_HEARTBEATS` without a word it
  may stand still: none waits there, as far as the room is concerned.
- A batcher in which no row of the most urgent class waits may send one while there is a place, until it has an equal
  part of the slots: such a row does not wait for a grant.
- While a row is computed alone nobody has room, nor while a batch runs that no row can join.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluice.internal.v1 import worker_pb2
from sluice.wire.subjects import CLASSES

KEPT_SHARE: Final = 16
"""One slot of so many, and at least one, stays with less urgent rows."""
SILENT_HEARTBEATS: Final = 3
"""How long a batcher's word on what waits there holds."""


class Room(NamedTuple):
    """The room of a worker for a class."""

    rows: int
    tokens: float
    """Tokens of the KV cache; infinite when only rows limit it."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a batcher may have sent in all, by class.

    Attributes:
        tokens: empty when only rows limit it.
        waits: whether rows wait at the batcher.
        among: batchers that room is divided among.
    """

    rows: Sequence[int] = ()
    tokens: Sequence[int] = ()
    waits: bool = False
    among: int = 1


@dataclass(slots=True)
class Holder:
    """One batcher's channel: what came over it since it was opened, and what waits at its other end."""

    epoch: int
    patience_s: float
    heard_at: float = 0.0
    """When it last said what waits; it holds for ``patience_s``."""
    taken_rows: int = 0
    taken_tokens: int = 0
    here: int = 0
    """Rows of it in the engine."""
    waiting: Sequence[int] = field(default=(0,) * len(CLASSES))


NO_ROOM: Final = (Room(0, math.inf),) * len(CLASSES)


class Grants:
    """The grants of all channels of a worker.

    Attributes:
        withdrawn: nobody has room.
    """

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}
        self.withdrawn = False

    def open(self, batcher: str, epoch: int, heartbeat_s: float) -> None:
        """The batcher has a new channel: its counts begin again."""
        self._holders[batcher] = Holder(epoch, SILENT_HEARTBEATS * heartbeat_s)

    def close(self, batcher: str) -> None:
        """The batcher is lost."""
        self._holders.pop(batcher, None)

    def epoch(self, batcher: str) -> int:
        """That of the batcher's channel; 0: it has none."""
        holder = self._holders.get(batcher)
        return holder.epoch if holder is not None else 0

    def take(self, batch: worker_pb2.Batch, now: float) -> None:
        """A batch has come, whatever becomes of its rows."""
        if (holder := self._holders.get(batch.batcher)) is not None:
            holder.taken_rows += len(batch.tasks)
            holder.taken_tokens += sum(row.cache_tokens for row in batch.tasks)
            self.wait(batch.batcher, batch.queued, now)

    def wait(self, batcher: str, waiting: Sequence[int], now: float) -> None:
        """So many rows of each class wait at the batcher."""
        if (holder := self._holders.get(batcher)) is not None:
            holder.waiting, holder.heard_at = _by_class(waiting), now

    def entered(self, batcher: str) -> None:
        """The engine has taken a row of the batcher."""
        if (holder := self._holders.get(batcher)) is not None:
            holder.here += 1

    def left(self, batcher: str) -> None:
        """A row of the batcher has left the engine."""
        if (holder := self._holders.get(batcher)) is not None and holder.here:
            holder.here -= 1

    def give(self, load: worker_pb2.WorkerLoad, now: float) -> Mapping[str, Grant]:
        """The grants to all batchers after a step or a command."""
        if self.withdrawn or load.batch_running:
            return {
                batcher: self._grant(holder, NO_ROOM) for batcher, holder in self._holders.items()
            }
        if not self._holders:
            return {}
        rooms = rooms_of(load)
        left = load.max_tasks - load.running - load.waiting if load.max_tasks else math.inf
        if len(self._holders) == 1:  # The usual case, at every step.
            ((batcher, holder),) = self._holders.items()
            return {batcher: self._grant(holder, rooms)}
        for holder in self._holders.values():
            if now > holder.heard_at + holder.patience_s:
                holder.waiting = (0,) * len(CLASSES)
        shares: dict[str, list[Room]] = {batcher: [] for batcher in self._holders}
        for rank, room in enumerate(rooms):
            wanted = {name: sum(each.waiting[: rank + 1]) for name, each in self._holders.items()}
            # A row that needs nearly all tokens would wait for ever for a part of them.
            asking = sum(count > 0 for count in wanted.values()) or len(wanted)
            for batcher, count in self._divided(room.rows, wanted).items():
                if not rank and not count and left > 0 and self._is_quiet(batcher, load.slots):
                    count = 1
                shares[batcher].append(Room(count, room.tokens / asking))
        return {batcher: self._grant(self._holders[batcher], shares[batcher]) for batcher in shares}

    def _is_quiet(self, batcher: str, slots: int) -> bool:
        """Whether no row of the most urgent class waits at the batcher, and it has less than its part of the slots."""
        holder = self._holders[batcher]
        return not holder.waiting[0] and holder.here < max(1, slots // len(self._holders))

    def _divided(self, rows: int, wanted: Mapping[str, int]) -> dict[str, int]:
        """The rows of a class's room, by batcher; ``wanted``: those that wait for it."""
        given = dict.fromkeys(self._holders, 0)
        have = {name: holder.here for name, holder in self._holders.items()}
        for _ in range(rows):
            asking = [name for name, count in wanted.items() if given[name] < count]
            name = min(asking or self._holders, key=have.__getitem__)
            have[name] += 1
            given[name] += 1
        return given

    def _grant(self, holder: Holder, rooms: Sequence[Room]) -> Grant:
        rows, waits = [holder.taken_rows + room.rows for room in rooms], any(holder.waiting)
        tokens: Sequence[int] = ()
        if not math.isinf(rooms[0].tokens):
            tokens = [holder.taken_tokens + max(0, int(room.tokens)) for room in rooms]
        return Grant(rows, tokens, waits, len(self._holders))


def rooms_of(load: worker_pb2.WorkerLoad) -> list[Room]:
    """The room of a worker for each class, most urgent first."""
    present = load.running + load.waiting
    free_rows = max(0, load.slots - present)
    free_tokens = math.inf
    if load.block_tokens:
        # Rows that wait inside have no blocks yet.
        free_tokens = load.free_blocks * load.block_tokens - load.waiting_tokens
    rooms = [Room(free_rows, free_tokens)] * len(CLASSES)
    if len(load.classes) != len(CLASSES):
        return rooms
    kept = -(-load.slots // KEPT_SHARE)
    taken = 0
    for rank, own in enumerate(load.classes[:-1]):
        taken += own.running + own.waiting
        below = load.classes[rank + 1 :]
        if present - taken > kept:
            rows = min(load.slots - taken - kept, load.max_tasks - present)
            tokens = free_tokens + sum(each.running_tokens + each.waiting_tokens for each in below)
            rooms[rank] = Room(max(free_rows, rows), tokens if rows > 0 else free_tokens)
    return rooms


def _by_class(waiting: Sequence[int]) -> Sequence[int]:
    return waiting if len(waiting) == len(CLASSES) else (0,) * len(CLASSES)
