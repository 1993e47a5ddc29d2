"""Types of the scheduler: tasks, batches, decisions. Lengths are in tokens, times in monotonic seconds."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class TenantShare:
    """One tenant in one class, see `batcher.core.scheduler.fair_share`.

    Attributes:
        time: virtual time: tokens it was given, divided by its weight.
        waiting: its tasks that wait.
        tokens: their prompts and expected answers.
    """

    __slots__ = ("time", "tokens", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.time = 0.0
        self.waiting = 0
        self.tokens = 0


class OpenBatch:
    """A batch of which a worker still computes ``rows`` rows."""

    __slots__ = ("rows", "sent_at", "worker")

    def __init__(self, worker: str, sent_at: float) -> None:
        self.worker = worker
        self.rows = 0
        self.sent_at = sent_at


class QueuedTask:
    """One task from `Queue.add` until it is finished, cancelled or expired.

    Attributes:
        workload: the kind of task, named by the caller; answers of one workload tend to have similar lengths.
        max_tokens: longest answer, what exists already included.
        prefix: hash of the prompt's beginning; empty: not known.
        prefill_tokens: prompt and the answer so far, which a worker computes before the next token.
        returned: whether it returned from a worker.
        charged: tokens that its tenant was charged for it.
        number: of its arrival or return; 0: it does not wait.
        waiting_since: when it began to wait.
        waited_s: how long it had waited when it was handed out.
        cost_tokens: prompt and expected answer.
        cache_tokens: its possible need of a worker's KV cache.
        guessed: whether these two are guesses, because there are no estimates for such answers.
        due: its deadline, or the end of the policy's horizon if that is earlier; -inf when it returned.
        share: its tenant's in its class.
        bucket: the number of its length bucket.
        open_batch: the batch it was handed out with.
        avoid: the worker that could not go on with it; others are preferred.
        alone: whether no other task may be in its batch.
    """

    __slots__ = (
        "alone",
        "avoid",
        "bucket",
        "cache_tokens",
        "charged",
        "cost_tokens",
        "deadline",
        "due",
        "guessed",
        "max_tokens",
        "number",
        "open_batch",
        "prefill_tokens",
        "prefix",
        "priority_class",
        "prompt_tokens",
        "request_id",
        "returned",
        "share",
        "tenant",
        "waited_s",
        "waiting_since",
        "workload",
    )

    # Set when it begins to wait.
    waiting_since: float
    cost_tokens: int
    cache_tokens: int
    guessed: bool
    due: float
    share: TenantShare
    bucket: int
    # Set when it is handed out.
    waited_s: float
    open_batch: OpenBatch

    def __init__(
        self,
        request_id: str,
        priority_class: str,
        deadline: float = math.inf,
        *,
        tenant: str = "default",
        workload: str = "",
        prompt_tokens: int = 1,
        max_tokens: int = 1,
        produced_tokens: int = 0,
        prefix: bytes = b"",
    ) -> None:
        self.request_id = request_id
        self.priority_class = priority_class
        self.deadline = deadline
        self.tenant = tenant
        self.workload = workload
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.prefix = prefix
        self.prefill_tokens = prompt_tokens + produced_tokens
        self.returned = False
        self.avoid = ""
        self.alone = False
        self.charged = 0
        self.number = 0

    def charge(self, tokens: int) -> None:
        """Sets the task's charge to ``tokens``, whatever it was before."""
        self.share.time += (tokens - self.charged) / self.share.weight
        self.charged = tokens


class BatchCause(Enum):
    """Why a batch was formed when it was."""

    WORKER_IDLE = "worker_idle"
    """The worker would have had nothing to do."""
    FULL = "full"
    """As many rows or tokens waited as a batch, or the worker, takes."""
    WINDOW_OVER = "window_over"
    """The wait for more rows was over."""
    SLOT_FREE = "slot_free"
    """The worker had room, and the policy waits for no more rows."""
    URGENT = "urgent"
    """A row came back from a lost worker, is close to its deadline, or its class is overdue."""


class BatchLimit(Enum):
    """Why a batch is not larger."""

    ALL_WAITING = "all_waiting"
    """Everything that waited is in it."""
    ALONE = "alone"
    """Its row, or the next, is to be alone in a batch."""
    ROWS = "rows"
    """It has as many rows as a batch may have."""
    TOKENS = "tokens"
    """It has as many tokens as a batch may have."""
    PADDING = "padding"
    """What else waits is too long or too short to go with it."""
    WORKER_ROWS = "worker_rows"
    """The worker has no more free rows."""
    WORKER_CACHE = "worker_cache"
    """The worker has no more room in its KV cache."""
    WORKER_PREFILL = "worker_prefill"
    """Enough prompt tokens wait in the worker."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks that go to a worker together, in the order in which they were chosen."""

    rows: tuple[QueuedTask, ...]
    worker: str
    cause: BatchCause
    limit: BatchLimit
    tokens: int
    """To prefill, without padding."""
    cache_tokens: int
    """That its rows may need of the KV cache."""
    padding_share: float
    """Part of rows times longest row that is padding: 0 to 1."""
    longest_wait: QueuedTask
    """The row that waited longest."""


class Decision(NamedTuple):
    """The scheduler's decision."""

    batch: Batch | None
    """None: nothing to send."""
    expired: tuple[str, ...]
    """Tasks whose deadline passed while they waited; the queue has removed them."""
    wake_at: float | None
    """When to ask again if nothing happens before; None: never."""
