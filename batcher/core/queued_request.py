"""Life cycle of a queued request: from its arrival until its frames can no longer be requested.

    WAITING --> SENT --> ENDED --> CLOSED

A request may end in every state before ENDED (deadline, failure), and may be closed in every state
(cancelled, returned to its gateway).
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

from batcher.core.scheduler.entry import Batch, QueueEntry
from sluice.internal.v1 import frame_pb2, task_pb2, worker_pb2
from sluice.settings.models import PrefixCache
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, unpack_to_keep

PREFIX_TOKENS: Final = 64
"""Prompts that share this many first tokens prefer the same worker."""
TIMEOUT_MS_MAX: Final = 2**32 - 1
"""Largest timeout that fits the field, in milliseconds; later deadlines are sent as none."""
REQUEST_ID_CHARACTERS_MAX: Final = 128
"""Longest request id that is accepted."""


class RequestState(IntEnum):
    """State of a request; it only moves forward."""

    WAITING = 0
    """In the queue."""
    SENT = 1
    """In a worker, or on its way to one."""
    ENDED = 2
    """Its final frame was sent; it is kept for a moment in case the gateway asks for it again."""
    CLOSED = 3
    """Forgotten."""


class QueuedRequest(QueueEntry):
    """A task in the batcher with its answer so far. The base class has what the scheduler orders by.

    Attributes:
        task: as received.
        attempt: is in every frame, so that the gateway can drop frames of earlier attempts.
        headers: of the message that brought it, with the trace context.
        size: of that message, in bytes.
        produced: answer tokens so far, from index 0.
        base: how many of `produced` came with the task.
        logprobs: of the tokens from `base` on; empty if the task does not ask for them.
        final: how it ended, once it has.
        worker: the worker that it was sent to; empty if it was not sent.
        is_acknowledged: whether its gateway was told that it waits here.
        is_admitted: whether the worker's engine has admitted its batch.
    """

    def __init__(
        self,
        task: task_pb2.Task,
        now: float,
        headers: Mapping[str, str] | None = None,
        size: int = 0,
        prefix_cache: PrefixCache = "tenant",
    ) -> None:
        """Create a request whose deadline counts from `now`, in monotonic seconds."""
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
        self.is_acknowledged = self.is_admitted = False
        self.state = RequestState.WAITING

    @property
    def ref(self) -> frame_pb2.TaskRef:
        """Reference to it in messages."""
        return frame_pb2.TaskRef(request_id=self.request_id, attempt=self.attempt)

    def end(self, final: frame_pb2.Final, now: float) -> None:
        """Set how the request ended, and add the times that only the batcher knows."""
        self.final, timings = final, final.timings
        batch = self.batch
        if batch is None:
            timings.queue_ms = (now - self.waiting_since) * 1e3
            return
        timings.queue_ms = self.waited_s * 1e3
        timings.batch_ms = (now - self.sent_at) * 1e3 - timings.prefill_ms - timings.decode_ms
        sent = final.batch
        sent.batch_id, sent.cause, sent.tasks = batch.batch_id, batch.cause, len(batch.entries)
        sent.padding_share, sent.waited_ms = batch.padding_share, timings.queue_ms
        sent.longest_waited_ms = batch.longest_wait.waited_s * 1e3
        sent.worker = batch.worker_id


def _prefix_key(task: task_pb2.Task, prefix_cache: PrefixCache) -> int:
    """Return a hash that prompts with shareable cache blocks have in common; 0 if there is none."""
    prompt = task.prompt_token_ids
    if prefix_cache == "off" or len(prompt) < PREFIX_TOKENS:
        return 0
    tenant = task.tenant if prefix_cache == "tenant" else ""
    return hash((tenant, *prompt[:PREFIX_TOKENS]))


def batch_message(
    batch: Batch[QueuedRequest],
    batcher: str,
    traceparents: Sequence[str],
    now: float,
    waiting: Sequence[int] = (),
) -> worker_pb2.Batch:
    """Return the message to the worker.

    Args:
        batch: the batch to send.
        batcher: id of this batcher.
        traceparents: trace contexts of the requests, in order.
        now: monotonic seconds.
        waiting: requests that still wait, by class.
    """
    message = worker_pb2.Batch(batch_id=batch.batch_id, batcher=batcher, queued=waiting)
    for request, traceparent in zip(batch.entries, traceparents, strict=True):
        left_ms = (request.deadline - now) * 1e3
        message.tasks.add(
            task=request.task,
            attempt=request.attempt,
            traceparent=traceparent,
            timeout_ms=max(1, math.ceil(left_ms)) if left_ms < TIMEOUT_MS_MAX else 0,
            cache_tokens=request.cache_tokens,
        )
    return message


def checked_task(payload: bytes) -> task_pb2.Task:
    """Return the task in a message.

    Raises:
        MalformedMessage: it is not a task or cannot be answered; the message names the field.
    """
    task = unpack_to_keep(task_pb2.Task, payload)
    checks = {
        "request_id: is empty or too long": 0 < len(task.request_id) <= REQUEST_ID_CHARACTERS_MAX,
        "gateway: cannot be part of a subject": subjects.is_token(task.gateway),
        "priority_class: is not known": task.priority_class in subjects.RANKS,
        "prompt_token_ids: is empty": len(task.prompt_token_ids) > 0,
        "sampling.max_tokens: is 0": task.sampling.max_tokens > 0,
    }
    for problem, is_valid in checks.items():
        if not is_valid:
            raise MalformedMessage(problem)
    return task
