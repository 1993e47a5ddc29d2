"""Rows for engines, and what comes out of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from model_workers.engine.protocol import Engine, Sampling, SequenceEnd, SequenceSpec, SequenceStep
from sluice.internal.v1 import frame_pb2, task_pb2, worker_pb2


def sequence_spec(
    request_id: str,
    prompt: Sequence[int],
    sampling: Sampling | None = None,
    *,
    produced: Sequence[int] = (),
    owner: str = "batcher-1",
    attempt: int = 0,
    deadline: float | None = None,
    rank: int = 0,
) -> SequenceSpec:
    """A row with defaults."""
    return SequenceSpec(
        request_id,
        owner,
        attempt,
        tuple(prompt),
        tuple(produced),
        sampling or Sampling(max_tokens=8),
        deadline,
        rank,
    )


def wire_row(
    request_id: str,
    prompt: Sequence[int] = (5, 6, 7),
    *,
    max_tokens: int = 4,
    attempt: int = 0,
    timeout_ms: int = 0,
    produced: Sequence[int] = (),
    traceparent: str = "",
    stop: Sequence[int] = (),
    priority_class: str = "interactive",
) -> worker_pb2.BatchedTask:
    """A row as a batcher sends it."""
    sampling = task_pb2.Sampling(
        max_tokens=max_tokens, top_p=1, repetition_penalty=1, stop_token_ids=stop
    )
    task = task_pb2.Task(
        request_id=request_id,
        priority_class=priority_class,
        prompt_token_ids=prompt,
        produced_token_ids=produced,
        sampling=sampling,
    )
    return worker_pb2.BatchedTask(
        task=task, attempt=attempt, timeout_ms=timeout_ms, traceparent=traceparent
    )


def batch(
    rows: Iterable[worker_pb2.BatchedTask],
    batcher: str = "batcher-1",
    batch_id: str = "batch",
    epoch: int = 0,
) -> worker_pb2.WorkerRequest:
    """A batch request."""
    message = worker_pb2.Batch(batch_id=batch_id, batcher=batcher, tasks=rows, epoch=epoch)
    return worker_pb2.WorkerRequest(batch=message)


def open_channel(
    batcher: str = "batcher-1", heartbeat_ms: int = 200, epoch: int = 0
) -> worker_pb2.WorkerRequest:
    """The request that opens a channel."""
    message = worker_pb2.OpenChannel(batcher=batcher, heartbeat_ms=heartbeat_ms, epoch=epoch)
    return worker_pb2.WorkerRequest(open_channel=message)


def cancel_tasks(
    *request_ids: str, batcher: str = "batcher-1", attempt: int = 0
) -> worker_pb2.WorkerRequest:
    """The request that stops rows."""
    rows = [frame_pb2.TaskRef(request_id=name, attempt=attempt) for name in request_ids]
    message = worker_pb2.CancelTasks(batcher=batcher, tasks=rows)
    return worker_pb2.WorkerRequest(cancel_tasks=message)


@dataclass
class Answers:
    """Tokens, ends and cached prompt tokens by request; checks the order of the steps as they come."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, SequenceEnd] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    def take(self, steps: Iterable[SequenceStep]) -> None:
        """Adds what a step did."""
        for step in steps:
            assert step.request_id not in self.ends, "a step behind the end"
            tokens = self.tokens.setdefault(step.request_id, [])
            assert step.start_index >= len(tokens)
            tokens += step.token_ids
            if step.end is not None:
                self.ends[step.request_id] = step.end
                self.cached[step.request_id] = step.cached_prompt_tokens


def drive(engine: Engine, *rows: SequenceSpec, now: float = 0.0) -> Answers:
    """Adds ``rows`` and steps until the engine is empty."""
    for row in rows:
        engine.add(row, now)
    answers = Answers()
    while engine.has_sequences():
        answers.take(engine.step(now))
    return answers
