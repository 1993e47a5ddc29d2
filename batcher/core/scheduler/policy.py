"""Batch policy: when a batch goes, and which requests join it. `Order` alone decides who is next.

Under the policy "continuous" a batch goes as soon as a worker has capacity for the first request in
order, with those that follow it while they fit. No request is skipped: while the first one fits no
worker nothing is sent, or small requests would starve a large one.

Under the static policies requests wait for others until a batch is full or a window closes:

1. A batch starts with the first request in order. It goes at once if that request presses: it was
   returned, is close to its deadline, or its class is overdue.
2. It goes when a window has closed, when enough requests or tokens wait to fill a batch of the
   policy's own size, or when the worker would idle and the policy sends to idle workers.
3. It never exceeds what the worker grants. If that is less than the batch that was due, the rest
   goes with the next grants, without another window.
4. If padding is limited, requests are grouped in buckets of similar length: a batch is filled
   class by class, from the bucket of its first request, then from neighbouring ones. While the first request in order
   may still wait, a full bucket of the same class goes before it.
5. `batches_running_max` holds back all but interactive and returned requests, which go alone past
   the others.
"""

import math
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from typing import Final, NamedTuple

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.class_order import drop_stale, push_item
from batcher.core.scheduler.entry import (
    Batch,
    BatchCause,
    BatchLimit,
    Decision,
    HeapItem,
    QueueEntry,
)
from batcher.core.scheduler.order import Order, is_unlimited
from batcher.core.scheduler.placement import Placement
from sluice.wire.subjects import CLASSES

WELL_WITHIN: Final = 0.8
"""Batches grow while their first tokens come within this share of the latency target."""
BEYOND: Final = 1.2
"""Batches shrink while their first tokens take longer than this multiple of the latency target."""
CUT_BY_WORKER: Final = frozenset(
    {BatchLimit.WORKER_ROWS, BatchLimit.WORKER_CACHE, BatchLimit.WORKER_PREFILL}
)
"""Limits set by the worker: the rest of a batch goes with its next grant."""
COMPLETE: Final = frozenset({BatchCause.FULL, BatchCause.WINDOW_OVER})
"""Causes that fill a batch up to the policy's own size."""

Bucket = tuple[str, int]
"""Class and number of a length range: a single bucket without limited padding, no class if the order ignores it."""


class Rest(NamedTuple):
    """Part of a due batch that the worker had no capacity for."""

    entries: int
    cause: BatchCause


class BatchPolicy:
    """Forms batches from an order. The queue reports every event of a request to it.

    Attributes:
        target_s: latency target to which the size adapts, in seconds; None: it is fixed.
        size: current maximum size of a batch.
    """

    def __init__(
        self, order: Order, placement: Placement, before: "BatchPolicy | None" = None
    ) -> None:
        """Create the policy of `order`; `before` is the one that it replaces, whose adapted size it keeps."""
        self._policy, self._order, self._placement = order.policy, order, placement
        policy = order.policy
        self.target_s = None if policy.is_continuous else policy.latency_target_s
        self.size = policy.max_rows
        if self.target_s is not None:
            adapted = before.size if before is not None and before.target_s is not None else 1
            self.size = min(adapted, policy.max_rows)
        self._width = math.log(policy.bucket_ratio)
        self._buckets: dict[Bucket, dict[str, QueueEntry]] = {}
        """Waiting requests in order of arrival, if padding is limited; no bucket is empty."""
        self._windows: list[HeapItem] = []
        """Heap of the waiting requests by when their windows close."""
        self._rests: dict[Bucket, Rest] = {}

    # Events.

    def on_wait(self, entry: QueueEntry) -> None:
        """Handle a request that starts to wait."""
        if self._policy.is_continuous:
            return
        item = (self._closes_at(entry), entry.number, entry)
        push_item(self._windows, item, self._order.waiting)
        self._cap_rests(joined=0 if self._policy.has_padding else 1)
        if self._policy.has_padding:
            self._buckets.setdefault(self._bucket_of(entry), {})[entry.request_id] = entry

    def on_cancel(self, entry: QueueEntry) -> None:
        """Handle a waiting request that leaves the order."""
        if self._policy.has_padding:
            bucket = self._bucket_of(entry)
            del self._buckets[bucket][entry.request_id]
            if not self._buckets[bucket]:
                del self._buckets[bucket]

    def on_answered(self, batch: Batch[QueueEntry], now: float) -> None:
        """Handle a batch of which every request has its first token, or has ended."""
        if self.target_s is None:
            return
        took_s = now - batch.entries[0].sent_at
        if took_s < WELL_WITHIN * self.target_s:
            self.size = min(self.size + 1, self._policy.max_rows)
        elif took_s > BEYOND * self.target_s:
            self.size = max(self.size - 1, 1)

    def window_s(self, priority_class: str, now: float) -> float:
        """Return how long, at most, a new request of the class waits for others, in seconds."""
        own = self._policy.window_s(priority_class)
        if not self._order.waiting:
            return 0.0 if self._policy.sends_to_idle else own
        return max(0.0, min(own, self._first_closes_at() - now))

    # Whether a batch goes, and to which worker.

    def form(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        """Form a batch for one worker, or decide when to try again."""
        first = self._order.first(now)
        if first is None:
            return Decision(None)
        free = self._below_limit(capacities)
        # Rule 5: workers at their limit of batches do not count, except for requests that ignore it.
        worker = self._placement.choose(first, free, now)
        if worker is not None:
            return self._form_in_order(first, worker, now)
        if len(free) == len(capacities) or not self._placement.choose(first, capacities, now):
            return Decision(None)
        return self._form_unlimited(capacities, now)

    def _below_limit(self, capacities: Sequence[Capacity]) -> Sequence[Capacity]:
        """Return the workers to which `batches_running_max` allows another batch."""
        limit = self._policy.batches_running_max
        if limit is None or self._policy.is_continuous:
            return capacities
        return [capacity for capacity in capacities if capacity.batches_running < limit]

    def _form_in_order(self, first: QueueEntry, worker: Capacity, now: float) -> Decision:
        cause, first = self._cause(first, worker, now)
        if cause is None:
            return Decision(None, self._wake_at(first))
        batch: Batch[QueueEntry] = Batch(worker.worker, cause)
        bucket = self._bucket_of(first)
        self._send(first, batch, now)
        self._fill(batch, self._companions(first, now), worker, now)
        self._note_rest(batch, bucket)
        return Decision(batch)

    def _form_unlimited(self, capacities: Sequence[Capacity], now: float) -> Decision:
        """Form a batch of requests that ignore `batches_running_max`."""
        first = self._order.first_unlimited(now)
        worker = None if first is None else self._placement.choose(first, capacities, now)
        if first is None or worker is None:
            return Decision(None)
        members = self._order.classes[first.priority_class]
        closes_at = self._closes_at(first)
        if members.pressing_at(first) <= now:
            cause = BatchCause.URGENT
        elif closes_at <= now:
            cause = BatchCause.WINDOW_OVER
        else:
            return Decision(None, min(closes_at, members.pressing_at(first)))
        batch: Batch[QueueEntry] = Batch(worker.worker, cause)
        self._send(first, batch, now)
        companions = filter(is_unlimited, self._companions(first, now, unlimited=True))
        self._fill(batch, companions, worker, now)
        if batch.limit is BatchLimit.ALL_WAITING and self._order.waiting:
            batch.limit = BatchLimit.WORKER_BATCHES
        return Decision(batch)

    # Why it goes.

    def _cause(
        self, first: QueueEntry, worker: Capacity, now: float
    ) -> tuple[BatchCause | None, QueueEntry]:
        """Return why a batch goes now (None if it waits) and its first request."""
        if self._order.classes[first.priority_class].pressing_at(first) <= now:
            return BatchCause.URGENT, first
        if self._policy.is_continuous:
            is_full = self._order.waiting >= self.size
            cause = BatchCause.FULL if is_full else BatchCause.SLOT_FREE
            return (BatchCause.WORKER_IDLE if worker.idle else cause), first
        if self._first_closes_at() <= now:
            return BatchCause.WINDOW_OVER, first
        # Rule 4: a full bucket of the same class need not wait for the window of the first request.
        for bucket, cause in self._complete(first).items():
            head = self._head(bucket, first, now)
            if self._placement.choose(head, [worker], now) is not None:
                return cause, head
        if self._policy.sends_to_idle and worker.idle:
            return BatchCause.WORKER_IDLE, first
        return None, first

    def _complete(self, first: QueueEntry) -> dict[Bucket, BatchCause]:
        """Return the buckets that need no window, the bucket of `first` first."""
        own = self._bucket_of(first)
        causes: dict[Bucket, BatchCause] = {}
        for bucket in (own, *sorted(self._buckets.keys() - {own})):
            if bucket[0] != own[0]:
                continue
            if rest := self._rests.get(bucket):
                causes[bucket] = rest.cause
            elif self._is_full(bucket):
                causes[bucket] = BatchCause.FULL
        return causes

    def _is_full(self, bucket: Bucket) -> bool:
        """Return whether enough requests or tokens wait to fill a batch."""
        tokens_max = self._policy.batch_tokens_max
        # Without padding all waiting requests are one group.
        if not self._policy.has_padding:
            tokens = sum(members.prefill_tokens for members in self._order.classes.values())
            return self._order.waiting >= self.size or tokens >= tokens_max
        entries = self._buckets[bucket]
        # The bucket holds lengths of one ratio: count each request with the shortest, so that the batch is surely full.
        shortest = math.exp(bucket[1] * self._width)
        return len(entries) >= self.size or len(entries) * shortest >= tokens_max

    def _head(self, bucket: Bucket, first: QueueEntry, now: float) -> QueueEntry:
        """Return the first request in order of a bucket."""
        if not self._policy.has_padding or bucket == self._bucket_of(first):
            return first
        return min(self._buckets[bucket].values(), key=lambda entry: self._order.key(entry, now))

    def _wake_at(self, first: QueueEntry) -> float:
        """Return when a waiting batch goes at the latest."""
        classes = self._order.classes
        times = [self._first_closes_at(), classes[first.priority_class].pressing_at(first)]
        if self._order.by_class:
            times += [members.overdue_at for members in classes.values() if members.waiting]
        return min(times)

    def _closes_at(self, entry: QueueEntry) -> float:
        """Return when the window of a request closes.

        It closes early if the request would otherwise miss its deadline: by the service time of its
        class or, while that is unknown, at half of the time left.
        """
        end = entry.waiting_since + self._policy.window_s(entry.priority_class)
        if entry.deadline == math.inf:
            return end
        service_s = self._order.classes[entry.priority_class].service_s
        left_s = entry.deadline - entry.waiting_since
        return min(end, entry.deadline - (service_s or left_s / 2))

    def _first_closes_at(self) -> float:
        """Return when the first window closes; infinite if no request waits."""
        drop_stale(self._windows)
        return self._windows[0][0] if self._windows else math.inf

    # With which requests.

    def _fill(
        self,
        batch: Batch[QueueEntry],
        companions: Iterator[QueueEntry],
        worker: Capacity,
        now: float,
    ) -> None:
        """Add the companions that fit to a batch that has its first request; set `batch.limit` to why it ended."""
        first = batch.entries[0]
        closed = set[tuple[str, bool]]()
        """(class, longer than `first`) of requests that are skipped, because one of them needed too much padding."""
        for entry in companions:
            side = entry.priority_class, entry.prefill_tokens > first.prefill_tokens
            if side in closed:
                continue
            limit = self._placement.limit(batch, entry, worker, self.size, now)
            limit = limit or self._own_limit(batch, entry)
            if limit is None:
                self._send(entry, batch, now)
                continue
            batch.limit = limit
            if limit is not BatchLimit.PADDING:
                return
            # Later requests of this side are at least about as far from the length of `first`.
            closed.add(side)

    def _own_limit(self, batch: Batch[QueueEntry], entry: QueueEntry) -> BatchLimit | None:
        """Return which budget of a static policy a request would exceed."""
        policy, tokens = self._policy, batch.tokens + entry.prefill_tokens
        if policy.is_continuous:
            return None
        longest = max(batch.longest, entry.prefill_tokens)
        # A padded batch costs its longest prompt once per request.
        cells = (len(batch.entries) + 1) * longest if policy.has_padding else tokens
        if cells > policy.batch_tokens_max:
            return BatchLimit.TOKENS
        return BatchLimit.PADDING if cells - tokens > policy.padding_max * cells else None

    def _companions(
        self, first: QueueEntry, now: float, *, unlimited: bool = False
    ) -> Iterator[QueueEntry]:
        """Yield the requests that may join `first`: in order or, if padding is limited, by class and nearest length."""
        if not self._policy.has_padding:
            # Each must be sent, or the loop left, before the next one: it stays the first until it is sent.
            next_entry = self._order.first_unlimited if unlimited else self._order.first
            while (entry := next_entry(now)) is not None:
                yield entry
            return
        own = self._bucket_of(first)[1]
        for name in CLASSES if self._order.by_class else ("",):
            # The nearest buckets first, longer and shorter ones alike.
            near = sorted((abs(n - own), n) for other, n in self._buckets if other == name)
            for _, number in near:
                bucket = self._buckets[name, number].values()
                yield from nsmallest(self.size, bucket, key=lambda t: self._order.key(t, now))

    def _send(self, entry: QueueEntry, batch: Batch[QueueEntry], now: float) -> None:
        self.on_cancel(entry)
        self._placement.send(entry, batch, now)

    def _note_rest(self, batch: Batch[QueueEntry], bucket: Bucket) -> None:
        """Record how much of a due batch the worker had no capacity for."""
        before = self._rests.pop(bucket, None)
        is_cut = batch.cause in COMPLETE and batch.limit in CUT_BY_WORKER
        # Rule 3: remember what was due but did not fit; it needs no window of its own.
        due = before or (Rest(self.size, batch.cause) if is_cut else None)
        if due is not None:
            entries = min(due.entries - len(batch.entries), self._waiting(bucket))
            if entries > 0:
                self._rests[bucket] = due._replace(entries=entries)

    def _cap_rests(self, joined: int) -> None:
        """Limit rests to the requests that still wait, not counting the `joined` newest."""
        capped = {
            bucket: rest._replace(entries=min(rest.entries, self._waiting(bucket) - joined))
            for bucket, rest in self._rests.items()
        }
        self._rests = {bucket: rest for bucket, rest in capped.items() if rest.entries > 0}

    def _waiting(self, bucket: Bucket) -> int:
        """Return how many requests of a bucket wait."""
        return (
            len(self._buckets.get(bucket, ())) if self._policy.has_padding else self._order.waiting
        )

    def _bucket_of(self, entry: QueueEntry) -> Bucket:
        if not self._policy.has_padding:
            return "", 0
        name = entry.priority_class if self._order.by_class else ""
        return name, int(math.log(max(entry.prefill_tokens, 1)) / self._width)
