"""Types of the scheduler: tasks and batches. Lengths are in tokens, times in monotonic seconds."""

import math
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar, cast

Entry = tuple[float, int, "QueuedTask"]
"""A waiting task, by a time and its number."""


@dataclass(eq=False, slots=True)
class Tenant:
    """A tenant in one class.

    Attributes:
        time: virtual time.
        waiting: its tasks that wait.
        tokens: their prompts and expected answers.
        in_turn: a heap of its tasks by `QueuedTask.due` and number; those that were lost before are elsewhere.
        by_deadline: a heap of those of them that have a deadline.
        turn, late, ahead: where it is in the lists of `ClassOrder`.
    """

    weight: float
    time: float = 0.0
    tokens: int = 0
    waiting: int = 0
    in_turn: list[Entry] = field(default_factory=list)
    by_deadline: list[Entry] = field(default_factory=list)
    turn: "tuple[float, float, int, Tenant] | None" = None
    late: "tuple[float, int, Tenant] | None" = None
    ahead: "tuple[float, int, Tenant] | None" = None


@dataclass(eq=False, slots=True)
class QueuedTask:
    """One task from `Queue.add` until it is finished, cancelled or expired.

    Attributes:
        workload: the kind of task, named by the caller; answers of one workload tend to have similar lengths.
        max_tokens: longest answer, what exists already included.
        min_tokens: shortest answer, likewise.
        prefix: hash of the prompt's beginning; 0: not known.
        prefill_tokens: prompt and the answer so far, which a worker computes before the next token.
        returned: whether a batcher had it before, and lost it or gave it back.
        age_s: how long ago it came to its gateway, when it was added.
        charged: tokens that its tenant was charged for it.
        number: of its arrival; 0: it does not wait.
        waiting_since: when it began to wait.
        waited_s: how long it had waited when it was handed out.
        cost_tokens: prompt and expected answer.
        cache_tokens: its possible need of a worker's KV cache.
        guessed: whether these two are guesses, because there are no estimates for such answers.
        due: its deadline, or the end of the policy's horizon if that is earlier.
        share: its tenant's in its class.
        sent_at: when it was handed out.
        full_s: clock of full capacity at that time, see `batcher.core.scheduler.speed`.
        batch: the batch it was handed out with.
        answered: whether it has its first token since then, or has ended.
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
    share: Tenant = field(init=False)
    # Set when it is handed out.
    sent_at: float = field(init=False)
    full_s: float = field(init=False)
    waited_s: float = field(init=False)
    batch: "Batch[QueuedTask] | None" = None
    answered: bool = False

    def __post_init__(self, produced_tokens: int) -> None:
        self.prefill_tokens = self.prompt_tokens + produced_tokens


class BatchCause(StrEnum):
    """Why a batch was formed when it was."""

    WORKER_IDLE = "worker_idle"
    """The worker would have had nothing to do."""
    FULL = "full"
    """As many requests or tokens waited as a batch may have."""
    WINDOW_OVER = "window_over"
    """The wait for more rows was over."""
    SLOT_FREE = "slot_free"
    """The worker had room, and the policy waits for no more rows."""
    URGENT = "urgent"
    """A row was lost before, is close to its deadline, or its class is overdue."""


class BatchLimit(StrEnum):
    """Why a batch is not larger."""

    ALL_WAITING = "all_waiting"
    """Everything that waited is in it."""
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
    WORKER_BATCHES = "worker_batches"
    """The worker has as many batches as the policy allows, and only requests that this does not hold back went."""


T = TypeVar("T", bound=QueuedTask)


@dataclass(eq=False, slots=True)
class Batch(Generic[T]):
    """Tasks that go to a worker together.

    Attributes:
        rows: in the order in which they were chosen.
        tokens: to prefill, without padding.
        cache_tokens: that its rows may need of the KV cache.
        longest: the tokens to prefill of its longest row.
        longest_wait: the row that waited longest.
        batch_id: its name, once it is sent.
        worker_id: what the worker calls itself.
        answered: how many of its requests have their first token, or have ended.
    """

    worker: str
    cause: BatchCause
    limit: BatchLimit = BatchLimit.ALL_WAITING
    rows: list[T] = field(default_factory=list)
    tokens: int = 0
    cache_tokens: int = 0
    longest: int = 0
    longest_wait: T = field(init=False)
    batch_id: str = ""
    worker_id: str = ""
    answered: int = 0

    def add(self, row: T) -> None:
        """``row`` goes with it."""
        if not self.rows or row.waiting_since < self.longest_wait.waiting_since:
            self.longest_wait = row
        self.rows.append(row)
        self.tokens += row.prefill_tokens
        self.cache_tokens += row.cache_tokens
        self.longest = max(self.longest, row.prefill_tokens)
        row.batch, row.answered = cast("Batch[QueuedTask]", self), False

    @property
    def padding_share(self) -> float:
        """Part of rows times longest row that is padding: 0 to 1."""
        return 1 - self.tokens / max(1, len(self.rows) * self.longest)


class Decision(NamedTuple):
    """The scheduler's decision."""

    batch: Batch[QueuedTask] | None
    """None: nothing to send."""
    wake_at: float | None = None
    """When to ask again if nothing happens before; None: when something has changed."""
