"""The items of a pass that are in memory: which is sent next, and which wait for a next try or for an identical item.

    add(items)  ->  next(now)  ->  answered(item) | failed(item, ...)

Rules:
- Items are sent in blocks: those of one `add` are sorted, shared beginnings next to each other, then by length, so that
  batches are dense and prefixes are found in the cache. The order between blocks is that of the input.
- An item with a hash waits for the first one with the same hash and shares its end.
- Everything in memory is bounded by the caller: it adds no more while `has_room` is False.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from jobs.core.pace import Budget, Rate
from jobs.core.retry import WAIT_S_MAX, Failure, RetryPolicy
from sluice.v1.inference_pb2 import EmbedRequest, GenerateRequest

BLOCK: Final = 512
"""Items that are sorted together."""
BLOCK_BYTES: Final = 4 * 1024 * 1024
"""A block whose requests have so many bytes is whole with fewer items."""
SPAN_MAX: Final = 8192
"""Items between the oldest without an outcome and the newest in memory."""
BYTES_MAX: Final = 32 * 1024 * 1024
"""The limit of the requests in memory, bytes."""
ITEM_BYTES: Final = 16 * 1024
"""Bytes of requests in flight, on average over the items that may be; another one goes below it."""
NO_ROOM_WAIT_S_MAX: Final = 15.0
_BEGINNING: Final = 64
"""Characters of a prompt that tell which beginning it shares."""


@dataclass(slots=True)
class Entry:
    """An item in memory.

    Attributes:
        place: among the items of the pass, from 0.
        index: its index in the stage; another one only where dead letters run again.
        input_hash: of what is computed; empty: nothing else is taken for identical.
        earlier_reason: why it was a dead letter before.
        earlier_bytes: of the line of that dead letter in the output.
        tries: times that it was sent and counted.
        refusals: times in succession that the mesh had no room.
        followers: later items with the same hash.
    """

    place: int
    index: int
    line: int
    custom_id: str
    url: str
    request: GenerateRequest | EmbedRequest
    input_hash: bytes = b""
    document: int = 0
    part: int = 0
    parts: int = 0
    earlier_reason: str = ""
    earlier_bytes: int = 0
    size: int = 0
    tries: int = 0
    refusals: int = 0
    reserved_tokens: float = 0.0
    followers: list["Entry"] = field(default_factory=list)


ANSWER_TOKENS: Final = 256
"""Tokens expected of an answer without a limit, before the first one is known."""
BYTES_A_TOKEN: Final = 4


class Window:
    """The items of one pass."""

    def __init__(
        self,
        concurrency: int,
        policy: RetryPolicy,
        requests: Rate,
        tokens: Rate,
        budget: Budget | None = None,
    ) -> None:
        """``concurrency``: items in flight, may be changed while it runs."""
        self.concurrency = concurrency
        self._budget = budget or Budget(0.0)
        self._answers = self._answered_tokens = 0
        self._policy = policy
        self._requests = requests
        self._tokens = tokens
        self._waiting: deque[Entry] = deque()
        self._later: list[tuple[float, int, Entry]] = []
        self._in_flight: dict[int, Entry] = {}
        self._in_flight_bytes = 0
        self._leaders: dict[bytes, Entry] = {}
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        """Items without an outcome."""
        return self._count

    @property
    def in_flight(self) -> int:
        """Items that were sent and not answered yet."""
        return len(self._in_flight)

    def has_room(self, low_water: int, newest: int) -> bool:
        """Whether another block may be added, with these bounds of the indexes that are not done."""
        return (
            len(self._waiting) < BLOCK and newest - low_water < SPAN_MAX and self._bytes < BYTES_MAX
        )

    def add(self, block: Sequence[Entry]) -> None:
        """Adds items that were not seen before."""
        leaders = []
        for entry in block:
            entry.size = entry.request.ByteSize()
            self._bytes += entry.size
            self._count += 1
            leader = self._leaders.get(entry.input_hash) if entry.input_hash else None
            if leader is not None:
                leader.followers.append(entry)
                continue
            if entry.input_hash:
                self._leaders[entry.input_hash] = entry
            leaders.append(entry)
        shared = Counter(map(_beginning, leaders))

        def order(entry: Entry) -> tuple[str, int, int]:
            beginning = _beginning(entry)
            return beginning if shared[beginning] > 1 else "", entry.size, entry.place

        self._waiting.extend(sorted(leaders, key=order))

    def next(self, now: float) -> Entry | None:
        """The next item to send; it is in flight from now on. None: see `wait_s`."""
        if self.wait_s(now) != 0.0:
            return None
        again = self._later and self._later[0][0] <= now
        entry = heapq.heappop(self._later)[2] if again else self._waiting.popleft()
        self._in_flight[entry.place] = entry
        self._in_flight_bytes += entry.size
        self._requests.took(1)
        entry.reserved_tokens = self._expected_tokens(entry)
        self._tokens.took(entry.reserved_tokens)
        return entry

    def wait_s(self, now: float) -> float | None:
        """How long until an item may be sent; None: not before something else happens."""
        in_flight = len(self._in_flight)
        most = self.concurrency
        if in_flight >= most or self._in_flight_bytes >= most * ITEM_BYTES:
            return None
        if not self._budget.allows(in_flight):
            return None
        due = 0.0 if self._waiting else self._later[0][0] - now if self._later else None
        if due is None:
            return None
        return max(0.0, due, self._requests.wait_s(now), self._tokens.wait_s(now))

    def answered(self, entry: Entry, tokens: int, cost: float = 0.0) -> list[Entry]:
        """``entry`` has an answer, for ``tokens`` computed that cost this; returns the items that share it."""
        self._give_back(entry)
        self._tokens.took(tokens)
        self._budget.took(cost)
        self._answers += 1
        self._answered_tokens += tokens
        return self._remove(entry)

    def failed(self, entry: Entry, kind: Failure, wait_s: float, now: float, dice: float) -> bool:
        """Whether ``entry`` is dead; else it is sent again later, not before ``wait_s`` seconds."""
        self._give_back(entry)
        if kind is Failure.NO_ROOM:
            entry.refusals += 1
            step = RetryPolicy(wait_s_max=NO_ROOM_WAIT_S_MAX).wait_s(entry.refusals, dice)
        else:
            entry.refusals = 0
            entry.tries += 1
            if kind is Failure.PERMANENT or entry.tries > self._policy.retries:
                return True
            step = self._policy.wait_s(entry.tries, dice)
        # A cost of a day is refused until it ends, but an operator may change that sooner.
        self._send_later(entry, now + max(step, min(wait_s, WAIT_S_MAX)))
        return False

    def returned(self, entry: Entry, now: float) -> None:
        """The call that carried ``entry`` is gone: it is sent again at once."""
        self._give_back(entry)
        self._send_later(entry, now)

    def died(self, entry: Entry) -> list[Entry]:
        """``entry`` is a dead letter; returns the items that share that."""
        return self._remove(entry)

    def _expected_tokens(self, entry: Entry) -> float:
        """Set aside until its answer is there: the mean so far, at first what its request could take."""
        if self._answers:
            return self._answered_tokens / self._answers
        sampling = getattr(entry.request, "sampling", None)
        answer = 0 if sampling is None else sampling.max_tokens or ANSWER_TOKENS
        return float(entry.size / BYTES_A_TOKEN + answer)

    def _give_back(self, entry: Entry) -> None:
        self._tokens.took(-entry.reserved_tokens)
        entry.reserved_tokens = 0.0

    def _send_later(self, entry: Entry, at: float) -> None:
        self._land(entry)
        heapq.heappush(self._later, (at, entry.place, entry))

    def _land(self, entry: Entry) -> None:
        if self._in_flight.pop(entry.place, None) is not None:
            self._in_flight_bytes -= entry.size

    def _remove(self, entry: Entry) -> list[Entry]:
        self._land(entry)
        if entry.input_hash:
            del self._leaders[entry.input_hash]
        for one in (entry, *entry.followers):
            self._bytes -= one.size
            self._count -= 1
        return entry.followers


class DoneIndexes:
    """The indexes of a pass that have an outcome: all below a mark, and some above it.

    Attributes:
        low_water: every index below it is in the set.
    """

    def __init__(self, low_water: int = 0, ranges: Sequence[int] = ()) -> None:
        """``ranges``: begin and end of each range above the mark, as `ranges` gives them."""
        self.low_water = low_water
        self._above = {
            index
            for begin, end in zip(ranges[::2], ranges[1::2], strict=True)
            for index in range(begin, end)
        }

    def __contains__(self, index: int) -> bool:
        return index < self.low_water or index in self._above

    def add(self, indexes: Iterable[int]) -> None:
        """Adds ``indexes``; none of them is in the set."""
        for index in indexes:
            assert index not in self, f"item {index} has an outcome already"
            self._above.add(index)
        while self.low_water in self._above:
            self._above.discard(self.low_water)
            self.low_water += 1

    @property
    def ranges(self) -> list[int]:
        """Begin and end of each range above the mark, in order, the ends excluded."""
        ranges: list[int] = []
        for index in sorted(self._above):
            if ranges and ranges[-1] == index:
                ranges[-1] = index + 1
            else:
                ranges += (index, index + 1)
        return ranges

    @property
    def is_whole(self) -> bool:
        """Whether nothing is above the mark."""
        return not self._above


def _beginning(entry: Entry) -> str:
    request = entry.request
    if isinstance(request, EmbedRequest):
        return ""  # texts share nothing in a worker
    if request.HasField("chat") and request.chat.messages:
        return request.chat.messages[0].content[:_BEGINNING]
    return request.prompt[:_BEGINNING]
