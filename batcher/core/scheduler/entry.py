"""Types of the scheduler: entries and batches. Lengths are in tokens, times in monotonic seconds."""

import math
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar, cast

from typing_extensions import override

from sluice.fair_queue import Flow

HeapItem = tuple[float, int, "QueueEntry"]
"""A waiting entry in a heap: its sort time, the number it had when it was pushed, and itself."""


@dataclass(eq=False, slots=True)
class TenantShare(Flow):
    """A tenant's share of one class.

    Attributes:
        waiting: number of waiting entries.
        tokens: prompt and expected answer tokens of the waiting entries.
        in_turn: heap of the entries by `QueueEntry.due` and number, without returned ones.
        by_deadline: heap of the entries in `in_turn` that have a deadline.
        late: position in `ClassOrder._late`.
    """

    tokens: int = 0
    waiting: int = 0
    in_turn: list[HeapItem] = field(default_factory=list)
    by_deadline: list[HeapItem] = field(default_factory=list)
    late: "tuple[float, int, TenantShare] | None" = None

    @property
    @override
    def is_waiting(self) -> bool:
        return self.waiting > 0


@dataclass(eq=False, slots=True)
class QueueEntry:
    """A queued request as the scheduler sees it, from `Queue.add` until it is finished, cancelled or expired.

    Attributes:
        workload: kind of work named by the caller; answers of one workload tend to have similar lengths.
        max_tokens: longest possible answer, including tokens that came with the request.
        min_tokens: shortest possible answer, likewise.
        prefix: hash of the beginning of the prompt; 0 if unknown.
        prefill_tokens: prompt and answer so far, which a worker computes before the next token.
        returned: whether a batcher already had it, and lost or returned it.
        age_s: time since it reached its gateway, when it was added.
        charged: tokens that its tenant was charged for it.
        number: position in the order of arrival; 0 while it does not wait.
        waiting_since: when it started to wait.
        waited_s: how long it had waited when it was handed out.
        cost_tokens: prompt and expected answer.
        cache_tokens: KV cache tokens that it may need.
        guessed: whether `cost_tokens` and `cache_tokens` are guesses because nothing was learned yet.
        due: its deadline, or the end of the policy's horizon if that is earlier; 0 unless the order is fair.
        share: the share of its tenant in its class.
        sent_at: when it was handed out.
        full_s: full-capacity clock at `sent_at`; see `batcher.core.scheduler.speed`.
        batch: the batch that it was handed out with.
        answered: whether it got its first token since then, or has ended.
    """

    request_id: str
    priority_class: str
    deadline: float = math.inf
    tenant: str = "default"
    workload: str = ""
    prompt_tokens: int = 1
    max_tokens: int = 1
    min_tokens: int = 0
    produced_tokens: InitVar[int] = 0
    prefix: int = 0
    prefill_tokens: int = field(init=False)
    returned: bool = False
    age_s: float = 0.0
    charged: int = 0
    number: int = 0
    # Set when it begins to wait.
    waiting_since: float = field(init=False)
    cost_tokens: int = field(init=False)
    cache_tokens: int = field(init=False)
    guessed: bool = field(init=False)
    due: float = field(init=False)
    share: TenantShare = field(init=False)
    # Set when it is handed out.
    sent_at: float = field(init=False)
    full_s: float = field(init=False)
    waited_s: float = field(init=False)
    batch: "Batch[QueueEntry] | None" = None
    answered: bool = False

    def __post_init__(self, produced_tokens: int) -> None:
        self.prefill_tokens = self.prompt_tokens + produced_tokens


class BatchCause(StrEnum):
    """Why a batch was formed when it was."""

    WORKER_IDLE = "worker_idle"
    """The worker would have been idle."""
    FULL = "full"
    """Enough requests or tokens were waiting to fill a batch."""
    WINDOW_OVER = "window_over"
    """The batching window closed."""
    SLOT_FREE = "slot_free"
    """The worker had capacity, and the policy does not wait for more requests."""
    URGENT = "urgent"
    """A request was returned before, is close to its deadline, or its class is overdue."""


class BatchLimit(StrEnum):
    """Why a batch is not larger."""

    ALL_WAITING = "all_waiting"
    """It has everything that waited."""
    ROWS = "rows"
    """It has the maximum number of requests."""
    TOKENS = "tokens"
    """It has the maximum number of tokens."""
    PADDING = "padding"
    """The other waiting requests are too long or too short to join without too much padding."""
    WORKER_ROWS = "worker_rows"
    """The worker has no more free slots."""
    WORKER_CACHE = "worker_cache"
    """The worker has no more free KV cache."""
    WORKER_PREFILL = "worker_prefill"
    """The worker has enough prompt tokens to compute."""
    WORKER_BATCHES = "worker_batches"
    """The worker runs as many batches as the policy allows; only requests exempt from that limit
    were sent."""


T = TypeVar("T", bound=QueueEntry)


@dataclass(eq=False, slots=True)
class Batch(Generic[T]):
    """Requests that go to a worker together.

    Attributes:
        entries: in the order in which they were chosen.
        tokens: tokens to prefill, without padding.
        cache_tokens: KV cache tokens that its requests may need.
        longest: tokens to prefill of its longest request.
        longest_wait: the request that waited longest.
        batch_id: set when it is sent.
        worker_id: what the worker calls itself.
        answered: how many of its requests got their first token, or have ended.
    """

    worker: str
    cause: BatchCause
    limit: BatchLimit = BatchLimit.ALL_WAITING
    entries: list[T] = field(default_factory=list)
    tokens: int = 0
    cache_tokens: int = 0
    longest: int = 0
    longest_wait: T = field(init=False)
    batch_id: str = ""
    worker_id: str = ""
    answered: int = 0

    def add(self, entry: T) -> None:
        """Add a request."""
        if not self.entries or entry.waiting_since < self.longest_wait.waiting_since:
            self.longest_wait = entry
        self.entries.append(entry)
        self.tokens += entry.prefill_tokens
        self.cache_tokens += entry.cache_tokens
        self.longest = max(self.longest, entry.prefill_tokens)
        entry.batch, entry.answered = cast("Batch[QueueEntry]", self), False

    @property
    def padding_share(self) -> float:
        """Share of the padded batch that is padding, 0 to 1."""
        return 1 - self.tokens / max(1, len(self.entries) * self.longest)


class Decision(NamedTuple):
    """What the scheduler decided."""

    batch: Batch[QueueEntry] | None
    """Batch to send; None if there is none."""
    wake_at: float | None = None
    """When to ask again if no event comes before; None: only after an event."""
