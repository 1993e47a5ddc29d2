"""What the queue answers: a batch, and why it is what it is."""

from enum import Enum
from typing import NamedTuple


class BatchCause(Enum):
    """Why a batch was formed when it was."""

    WORKER_IDLE = "worker_idle"
    """The worker would have had nothing to do."""
    FULL = "full"
    """As many rows or tokens waited as a batch, or the worker, takes."""
    WINDOW_OVER = "window_over"
    """The wait for company was over, or there is none."""
    URGENT = "urgent"
    """A row came back from a lost worker, is close to its deadline, or its class is overdue."""


class BatchLimit(Enum):
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


class BatchRow(NamedTuple):
    """One member of a batch."""

    request_id: str
    waited_s: float
    prefill_tokens: int
    """Prompt and the answer so far: what the worker computes before the next token."""
    cache_tokens: int
    """What it may need of the KV cache: prompt and expected answer."""


class Batch(NamedTuple):
    """Tasks that go to a worker together, most urgent first."""

    rows: tuple[BatchRow, ...]
    worker: str
    cause: BatchCause
    limit: BatchLimit
    tokens: int
    """To prefill, without padding."""
    cache_tokens: int
    """That its rows may need of the KV cache."""
    padding_share: float
    """Part of rows times longest row that is padding: 0 to 1."""
    longest_wait: BatchRow
    """Who waited longest."""


class Decision(NamedTuple):
    """What to do now."""

    batch: Batch | None
    """None: nothing to send."""
    expired: tuple[str, ...]
    """Tasks whose deadline passed while they waited; the queue has forgotten them."""
    wake_at: float | None
    """When to ask again if nothing happens before; None: never."""
