"""The life cycle of a row: a task from its arrival in the batcher until no frames of it can be requested any more.

    WAITING --> SENT --> ENDED --> CLOSED

A row may end in every state before ENDED (deadline, failure), and may be closed in every state (cancelled, returned to
its gateway).
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

from batcher.core.scheduler.task import Batch, QueuedTask
from sluice.internal.v1 import frame_pb2, task_pb2, worker_pb2
from sluice.settings.models import PrefixCache
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, unpack_to_keep

PREFIX_TOKENS: Final = 64
"""Prompts that begin with the same this many tokens go to the same worker if nothing speaks against it."""
TIMEOUT_MS_MAX: Final = 2**32 - 1
REQUEST_ID_CHARACTERS_MAX: Final = 128


class RowState(IntEnum):
    """The state of a row; a row only moves on."""

    WAITING = 0
    """In the queue."""
    SENT = 1
    """Its worker has it, or will."""
    ENDED = 2
    """Its final frame went out; it is kept for a moment, in case the gateway asks for it again."""
    CLOSED = 3
    """Forgotten."""


class Row(QueuedTask):
    """One task with its answer so far. The fields that the scheduler orders by are in its base class.

    Attributes:
        task: as received.
        attempt: goes into every frame of the row, and fences out earlier owners.
        headers: of its message, with the trace context.
        size: of its message, bytes.
        produced: the answer so far, from index 0.
        base: how many of `produced` the gateway had when the task came.
        final: the end, once there is one.
        worker: the worker it was sent to; empty: it was not sent.
        told: whether its gateway was told that it waits.
        taken: whether the worker's engine has said that it has the batch.
    """

    def __init__(
        self,
        task: task_pb2.Task,
        now: float,
        headers: Mapping[str, str] | None = None,
        size: int = 0,
        prefix_cache: PrefixCache = "tenant",
    ) -> None:
        """Make a row whose deadline counts from ``now``, monotonic seconds."""
        prompt, self.produced = task.prompt_token_ids, list(task.produced_token_ids)
        self.base = len(self.produced)
        super().__init__(
            task.request_id,
            task.priority_class,
            now + task.timeout_ms / 1e3 if task.timeout_ms else math.inf,
            tenant=task.tenant or "default",
            workload=task.workload,
            prompt_tokens=len(prompt),
            max_tokens=task.sampling.max_tokens,
            min_tokens=task.sampling.min_tokens,
            produced_tokens=self.base,
            prefix=_prefix_key(task, prefix_cache),
            returned=task.attempt > 0 or task.last_try,
            age_s=task.age_ms / 1e3,
            charged=task.charged_tokens,
        )
        self.task = task
        self.attempt = task.attempt
        self.headers = headers or {}
        self.size = size
        self.logprobs: list[frame_pb2.Logprobs] = []
        self.final: frame_pb2.Final | None = None
        self.worker = ""
        self.told = self.taken = False
        self.state = RowState.WAITING

    @property
    def ref(self) -> frame_pb2.TaskRef:
        """Its name in messages."""
        return frame_pb2.TaskRef(request_id=self.request_id, attempt=self.attempt)

    def end(self, final: frame_pb2.Final, now: float) -> None:
        """``final`` is its end, with the timings of its worker, if one ended it: adds what the batcher knows."""
        self.final, timings = final, final.timings
        batch = self.batch
        if batch is None:
            timings.queue_ms = (now - self.waiting_since) * 1e3
            return
        timings.queue_ms = self.waited_s * 1e3
        timings.batch_ms = (now - self.sent_at) * 1e3 - timings.prefill_ms - timings.decode_ms
        sent = final.batch
        sent.batch_id, sent.cause, sent.tasks = batch.batch_id, batch.cause, len(batch.rows)
        sent.padding_share, sent.waited_ms = batch.padding_share, timings.queue_ms
        sent.longest_waited_ms = batch.longest_wait.waited_s * 1e3
        sent.worker = batch.worker_id


def _prefix_key(task: task_pb2.Task, prefix_cache: PrefixCache) -> int:
    """Return what prompts have in common whose cached blocks the workers would share; 0: nothing."""
    prompt = task.prompt_token_ids
    if prefix_cache == "off" or len(prompt) < PREFIX_TOKENS:
        return 0
    tenant = task.tenant if prefix_cache == "tenant" else ""
    return hash((tenant, *prompt[:PREFIX_TOKENS]))


def batch_message(
    batch: Batch[Row],
    batcher: str,
    traceparents: Sequence[str],
    now: float,
    waiting: Sequence[int] = (),
) -> worker_pb2.Batch:
    """The message to the worker; ``traceparents`` are those of the rows, ``waiting`` what still waits by class."""
    message = worker_pb2.Batch(batch_id=batch.batch_id, batcher=batcher, queued=waiting)
    for row, traceparent in zip(batch.rows, traceparents, strict=True):
        left_ms = (row.deadline - now) * 1e3
        message.tasks.add(
            task=row.task,
            attempt=row.attempt,
            traceparent=traceparent,
            timeout_ms=max(1, math.ceil(left_ms)) if left_ms < TIMEOUT_MS_MAX else 0,
            origin=row.headers.get("traceparent", ""),
            cache_tokens=row.cache_tokens,
        )
    return message


def checked_task(payload: bytes) -> task_pb2.Task:
    """The task in ``payload``.

    Raises:
        MalformedMessage: it is not a task, or not one that can be answered; says which field is wrong.
    """
    task = unpack_to_keep(task_pb2.Task, payload)
    problem = _problem(task)
    if problem:
        raise MalformedMessage(problem)
    return task


def _problem(task: task_pb2.Task) -> str:
    if not 0 < len(task.request_id) <= REQUEST_ID_CHARACTERS_MAX:
        return f"request_id: must have 1 to {REQUEST_ID_CHARACTERS_MAX} characters"
    if not subjects.is_token(task.gateway):
        return "gateway: cannot be part of a subject"
    if task.priority_class not in subjects.RANKS:
        return "priority_class: is not known"
    if not task.prompt_token_ids:
        return "prompt_token_ids: is empty"
    if task.sampling.max_tokens == 0:
        return "sampling.max_tokens: is 0"
    return ""
