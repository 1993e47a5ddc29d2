"""Window of the items in memory: which is sent next, and which wait for a retry or an identical item.

    add(items)  ->  next_item(now)  ->  on_answer(item) | on_failure(item, ...)

- Items are sent in blocks. Those of one `add` are sorted: shared prefixes next to each other, then by
  length, so that batches are dense and prefixes are found in the cache. Blocks keep the order of the
  input.
- An item with a hash waits for the first one with the same hash and shares its outcome.
- The caller bounds memory: it adds no more while `has_room` is False.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from jobs.core.pace import CostBudget, RateLimit
from jobs.core.retry import WAIT_S_MAX, FailureKind, ItemRetryPolicy
from jobs.items import Item
from sluice.v1.inference_pb2 import EmbedRequest

BLOCK: Final = 512
"""Items that are sorted together."""
BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bytes of requests at which a block is complete with fewer items."""
SPAN_MAX: Final = 8192
"""Items between the oldest without an outcome and the newest in memory."""
BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes of all requests in memory."""
ITEM_BYTES: Final = 16 * 1024
"""Bytes in flight for each item of `concurrency`; another item is sent only below their product."""
NO_CAPACITY_WAIT_S_MAX: Final = 15.0
"""Upper bound of the growing wait of an item for which the mesh has no capacity, in seconds; the retry delay of the
error may be longer."""
_BEGINNING: Final = 64
"""Characters of a prompt that identify a shared prefix."""


ANSWER_TOKENS: Final = 256
"""Tokens expected of an answer without a limit, until the first answer is known."""
BYTES_A_TOKEN: Final = 4
"""Bytes per token, for estimates before the first answer."""


@dataclass(eq=False)
class ItemWindow:
    """Items of one attempt at a stage; `concurrency` bounds those in flight and may change later."""

    concurrency: int
    policy: ItemRetryPolicy
    requests: RateLimit
    tokens: RateLimit
    budget: CostBudget = field(default_factory=CostBudget)

    def __post_init__(self) -> None:
        self._answers = self._answered_tokens = 0
        self._waiting: deque[Item] = deque()
        self._later: list[tuple[float, int, Item]] = []
        self._in_flight: dict[int, Item] = {}
        self._in_flight_bytes = 0
        self._leaders: dict[bytes, Item] = {}
        self._bytes = 0
        self._count = 0

    def __len__(self) -> int:
        """Return the number of items without an outcome."""
        return self._count

    @property
    def in_flight(self) -> int:
        """Number of items that were sent and not answered yet."""
        return len(self._in_flight)

    def has_room(self, low_water: int, newest: int) -> bool:
        """Return whether another block may be added.

        Args:
            low_water: every position below it has an outcome.
            newest: items that were read so far.
        """
        return (
            len(self._waiting) < BLOCK and newest - low_water < SPAN_MAX and self._bytes < BYTES_MAX
        )

    def add(self, block: Sequence[Item]) -> None:
        """Add new items."""
        leaders = []
        for item in block:
            item.size = item.request.ByteSize()
            self._bytes += item.size
            self._count += 1
            # Only the first of identical items is sent; the others wait for its outcome.
            leader = self._leaders.get(item.input_hash) if item.input_hash else None
            if leader is not None:
                leader.followers.append(item)
                continue
            if item.input_hash:
                self._leaders[item.input_hash] = item
            leaders.append(item)
        shared = Counter(map(_beginning, leaders))

        def order(item: Item) -> tuple[str, int, int]:
            beginning = _beginning(item)
            return beginning if shared[beginning] > 1 else "", item.size, item.position

        self._waiting.extend(sorted(leaders, key=order))

    def next_item(self, now: float) -> Item | None:
        """Return the next item to send, which is in flight from now on; None: see `wait_s`."""
        if self.wait_s(now) != 0.0:
            return None
        # Retries that are due go before items that were never sent.
        again = self._later and self._later[0][0] <= now
        item = heapq.heappop(self._later)[2] if again else self._waiting.popleft()
        self._in_flight[item.position] = item
        self._in_flight_bytes += item.size
        self.requests.consume(1)
        item.reserved_tokens = self._expected_tokens(item)
        self.tokens.consume(item.reserved_tokens)
        return item

    def wait_s(self, now: float) -> float | None:
        """Return how long until an item may be sent, in seconds; None: not before an answer, a new item or limit."""
        in_flight = len(self._in_flight)
        limit = self.concurrency
        # Only a response changes these: no time to wait for.
        if in_flight >= limit or self._in_flight_bytes >= limit * ITEM_BYTES:
            return None
        if not (self._waiting or self._later) or not self.budget.allows(in_flight):
            return None
        due_s = 0.0 if self._waiting else self._later[0][0] - now
        return max(0.0, due_s, self.requests.wait_s(now), self.tokens.wait_s(now))

    def on_answer(self, item: Item, tokens: int, cost: float = 0.0) -> list[Item]:
        """Record the answer of an item with its computed tokens and cost; return the items that share it."""
        self._release_tokens(item)
        self.tokens.consume(tokens)
        self.budget.consume(cost)
        self._answers += 1
        self._answered_tokens += tokens
        return self.on_ended(item)

    def on_failure(
        self, item: Item, kind: FailureKind, wait_s: float, now: float, dice: float
    ) -> bool:
        """Schedule a retry of an item, or return True if it is dead; the caller then calls `on_ended`.

        Of `wait_s`, the retry delay of the error in seconds, at most `WAIT_S_MAX` counts.
        """
        self._release_tokens(item)
        # Without capacity the item is not at fault: the wait grows, its tries do not.
        if kind is FailureKind.NO_CAPACITY:
            item.refusals += 1
            step = ItemRetryPolicy(wait_s_max=NO_CAPACITY_WAIT_S_MAX).wait_s(item.refusals, dice)
        else:
            item.refusals = 0
            item.tries += 1
            if kind is FailureKind.PERMANENT or item.tries > self.policy.retries:
                return True
            step = self.policy.wait_s(item.tries, dice)
        # A retry delay may be hours (a daily budget), but an operator may raise the limit sooner.
        self._send_later(item, now + max(step, min(wait_s, WAIT_S_MAX)))
        return False

    def on_returned(self, item: Item, now: float) -> None:
        """Put back an item that got no outcome, to be sent again at `now` or later; this counts as no try."""
        self._release_tokens(item)
        self._send_later(item, now)

    def _expected_tokens(self, item: Item) -> float:
        """Return the tokens to set aside: the mean so far, at first what the request could take."""
        # The mean of real answers is better than any guess from the request.
        if self._answers:
            return self._answered_tokens / self._answers
        sampling = getattr(item.request, "sampling", None)
        answer = 0 if sampling is None else sampling.max_tokens or ANSWER_TOKENS
        return float(item.size / BYTES_A_TOKEN + answer)

    def _release_tokens(self, item: Item) -> None:
        self.tokens.consume(-item.reserved_tokens)
        item.reserved_tokens = 0.0

    def _send_later(self, item: Item, at: float) -> None:
        self._leave_flight(item)
        heapq.heappush(self._later, (at, item.position, item))

    def _leave_flight(self, item: Item) -> None:
        if self._in_flight.pop(item.position, None) is not None:
            self._in_flight_bytes -= item.size

    def on_ended(self, item: Item) -> list[Item]:
        """Record that an item has its outcome; return the items that share it."""
        self._leave_flight(item)
        # Later items with this hash find the answer in the cache, or try for themselves.
        if item.input_hash:
            del self._leaders[item.input_hash]
        for ended in (item, *item.followers):
            self._bytes -= ended.size
            self._count -= 1
        return item.followers


class DoneIndexes:
    """Positions with an outcome: all below a mark, and some above it.

    Attributes:
        low_water: every position below it is in the set.
    """

    def __init__(self, low_water: int = 0, ranges: Sequence[int] = ()) -> None:
        """Create the set; `ranges` has begin and end of each range above the mark."""
        self.low_water = low_water
        self._above = {
            index
            for begin, end in zip(ranges[::2], ranges[1::2], strict=True)
            for index in range(begin, end)
        }

    def __contains__(self, index: int) -> bool:
        return index < self.low_water or index in self._above

    def add(self, indexes: Iterable[int]) -> None:
        """Add positions, none of which is in the set."""
        for index in indexes:
            assert index not in self, f"item {index} has an outcome already"
            self._above.add(index)
        while self.low_water in self._above:
            self._above.discard(self.low_water)
            self.low_water += 1

    @property
    def ranges(self) -> list[int]:
        """Begin and end of each range above the mark, in order; ends are excluded."""
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


def _beginning(item: Item) -> str:
    request = item.request
    if isinstance(request, EmbedRequest):
        return ""  # texts share nothing in a worker
    if request.HasField("chat") and request.chat.messages:
        return request.chat.messages[0].content[:_BEGINNING]
    return request.prompt[:_BEGINNING]
