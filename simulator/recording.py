"""Turns the tasks and frames that pass by on NATS into a trace. Lengths and names only: no token is kept."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from simulator.trace import Arrival
from sluice.internal.v1 import frame_pb2, task_pb2

PENDING_MAX: Final = 100_000
"""Tasks whose end was not seen yet; more would mean that the frames do not pass here."""


@dataclass(slots=True)
class _Pending:
    """A request under way; ``end_index`` counts the tokens of its answer, ``base`` those it came with."""

    arrival: Arrival
    at: float
    base: int
    end_index: int
    first_at: float | None = None


class Recording:
    """Requests under way, by the times at which their messages passed.

    Attributes:
        dropped: tasks that were not taken, as `PENDING_MAX` were under way.
    """

    def __init__(self, began: float) -> None:
        self.dropped = 0
        self._began = began
        self._pending: dict[str, _Pending] = {}

    def __len__(self) -> int:
        """Requests whose end was not seen yet."""
        return len(self._pending)

    def task(self, task: task_pb2.Task, now: float) -> None:
        """A task passed; one that is published again counts once."""
        if task.request_id in self._pending:
            return
        if len(self._pending) >= PENDING_MAX:
            self.dropped += 1
            return
        base = len(task.produced_token_ids)
        arrival = _arrival(task, now - self._began)
        self._pending[task.request_id] = _Pending(arrival, now, base, base)

    def frames(self, frames: Iterable[frame_pb2.Frame], now: float) -> list[Arrival]:
        """Frames passed; returns the requests that ended with them."""
        return [arrival for frame in frames if (arrival := self._frame(frame, now)) is not None]

    def _frame(self, frame: frame_pb2.Frame, now: float) -> Arrival | None:
        pending = self._pending.get(frame.request_id)
        if pending is None:
            return None
        if frame.token_ids and pending.first_at is None:
            pending.first_at = now
        pending.end_index = max(pending.end_index, frame.start_index + len(frame.token_ids))
        if not frame.HasField("final"):
            return None
        del self._pending[frame.request_id]
        return _ended(pending, now)


def _arrival(task: task_pb2.Task, at_s: float) -> Arrival:
    """What is known when a task passes; its answer is yet to come."""
    timeout_ms = task.deadline_unix_ms - task.published_unix_ms
    return Arrival(
        at_s=round(at_s, 6),
        # Tokens that exist already are computed with the prompt.
        prompt_tokens=len(task.prompt_token_ids) + len(task.produced_token_ids),
        answer_tokens=1,
        max_tokens=max(1, task.sampling.max_tokens - len(task.produced_token_ids)),
        priority_class=task.priority_class,
        tenant=task.tenant or "default",
        workload=task.workload,
        timeout_s=max(0.0, timeout_ms / 1e3) if task.deadline_unix_ms else None,
        model=task.model,
    )


def _ended(pending: _Pending, now: float) -> Arrival:
    answer = max(1, pending.end_index - pending.base)
    first_at = pending.first_at
    return replace(
        pending.arrival,
        answer_tokens=answer,
        max_tokens=max(answer, pending.arrival.max_tokens),
        ttft_s=None if first_at is None else round(first_at - pending.at, 6),
        latency_s=round(now - pending.at, 6),
    )
