"""Traces of requests (arrival time, lengths, class, tenant; no text), and their recording.

A file holds one JSON object a line, in any order of time:

    {"at_s": 0.25, "prompt_tokens": 180, "answer_tokens": 55, "class": "interactive"}

| key | meaning | default |
|---|---|---|
| `at_s` | arrival, seconds since the trace began | required |
| `prompt_tokens` | at least 1 | required |
| `answer_tokens` | tokens that the answer had, at least 1 | required |
| `max_tokens` | what the caller allowed, at least `answer_tokens` | `answer_tokens` |
| `class` | interactive, standard or bulk | standard |
| `tenant` | who pays | default |
| `workload` | kind of work, the label "task" | empty |
| `timeout_s` | deadline, seconds after the arrival | none |
| `model` | the model that was asked | empty |
| `ttft_s`, `latency_s` | first token and end as recorded, seconds after the arrival | none |
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.wire.subjects import CLASSES

NAME_CHARACTERS_MAX: Final = 256
PENDING_MAX: Final = 100_000
"""Most recorded requests without an end; more would mean that their frames are not seen."""


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Tokens = Annotated[int, Field(ge=1, strict=True)]
Name = Annotated[str, Field(max_length=NAME_CHARACTERS_MAX)]
PriorityClass = Annotated[str, Field(alias="class", pattern=f"^({'|'.join(CLASSES)})$")]


class SimulationError(ValueError):
    """Raised if a trace, a cost or an option cannot be simulated; the message says which and why."""

    @classmethod
    def of(cls, error: ValueError, where: str) -> "SimulationError":
        """Return an error with its place; of a validation the first one, with its key."""
        if not isinstance(error, ValidationError):
            return cls(f"{where}: {error}")
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            return cls(f"{where}: {key} is missing")
        message = first["msg"].removeprefix("Value error, ")
        return cls(f"{where}: {key}: {first['input']!r}: {message}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; fields as in the table above, `priority_class` is `class`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    at_s: Seconds
    prompt_tokens: Tokens
    answer_tokens: Tokens
    max_tokens: Tokens
    priority_class: PriorityClass = "standard"
    tenant: Name = "default"
    workload: Name = ""
    timeout_s: Seconds | None = None
    model: Name = ""
    ttft_s: Seconds | None = None
    latency_s: Seconds | None = None


_ARRIVAL: Final = TypeAdapter(Arrival)


def format_line(arrival: Arrival) -> str:
    """Return the line of an arrival, without a line break; unset fields are left out."""
    values = {("class" if k == "priority_class" else k): v for k, v in asdict(arrival).items()}
    return json.dumps({k: v for k, v in values.items() if v is not None and v != ""})


def parse_trace(lines: Iterable[str]) -> list[Arrival]:
    """Return the arrivals of a file, in order of time.

    Raises:
        SimulationError: a line is malformed (the message has its number), or there is none.
    """
    numbered = enumerate(lines, start=1)
    arrivals = [_parse(number, line) for number, line in numbered if line.strip()]
    if not arrivals:
        raise SimulationError("the trace has no arrivals")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def json_object(line: str) -> dict[str, Any]:
    """Return the object of a line; raise ValueError if it is none."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("is not a JSON object")
    return values


def _parse(number: int, line: str) -> Arrival:
    try:
        values = json_object(line)
        if "answer_tokens" not in values:
            raise ValueError("answer_tokens is missing")
        arrival = _ARRIVAL.validate_python({"max_tokens": values["answer_tokens"], **values})
        if arrival.max_tokens < arrival.answer_tokens:
            raise ValueError(f"max_tokens: {arrival.max_tokens} is less than answer_tokens")
        return arrival
    except ValueError as error:
        raise SimulationError.of(error, f"line {number}") from error


@dataclass(slots=True)
class _Pending:
    """A request in flight; `base` counts the answer tokens that it came with, `end_index` all of them."""

    arrival: Arrival
    at: float
    base: int
    end_index: int
    first_at: float | None = None
    attempt: int = 0


class Recording:
    """Turns the tasks and frames on NATS into a trace. Keeps lengths and names only, no tokens.

    Attributes:
        dropped: tasks that were not recorded because `PENDING_MAX` requests were in flight.
    """

    def __init__(self, began: float, pending_max: int = PENDING_MAX) -> None:
        self._pending_max = pending_max
        self.dropped = 0
        self._began = began
        self._pending: dict[str, _Pending] = {}
        self._cancelled: dict[str, float] = {}

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._pending) - len(self._cancelled)

    def task(self, task: task_pb2.Task, now: float) -> None:
        """Record a task; one that is sent again counts once."""
        if (pending := self._pending.get(task.request_id)) is not None:
            pending.attempt = max(pending.attempt, task.attempt)
            self._cancelled.pop(task.request_id, None)
            return
        if task.attempt:
            return  # Its first attempt came before the recording began, or has ended in it.
        if len(self._pending) >= self._pending_max:
            self.dropped += 1
            return
        base, waited_s = len(task.produced_token_ids), task.waited_us / 1e6
        arrival = _arrival(task, max(0.0, now - waited_s - self._began), waited_s)
        self._pending[task.request_id] = _Pending(arrival, now - waited_s, base, base)

    def cancel(self, rows: Iterable[frame_pb2.TaskRef], now: float) -> None:
        """Record a cancel: the requests end now, unless they are sent again."""
        for row in rows:
            pending = self._pending.get(row.request_id)
            if pending is not None and row.attempt >= pending.attempt:
                self._cancelled.setdefault(row.request_id, now)

    def cancelled(self, before: float) -> list[Arrival]:
        """Return the requests that were cancelled before a time; no frame reports their end."""
        ended = [name for name, at in self._cancelled.items() if at < before]
        return [_ended(self._pending.pop(name), self._cancelled.pop(name)) for name in ended]

    def frames(self, frames: Iterable[frame_pb2.Frame], now: float) -> list[Arrival]:
        """Record frames; return the requests that ended with them."""
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
        self._cancelled.pop(frame.request_id, None)
        return _ended(pending, now)


def _arrival(task: task_pb2.Task, at_s: float, waited_s: float) -> Arrival:
    """Return the arrival of a task that was published `waited_s` later; its answer's length is unknown yet."""
    return Arrival(
        at_s=round(at_s, 6),
        # A worker computes tokens that exist already together with the prompt.
        prompt_tokens=len(task.prompt_token_ids) + len(task.produced_token_ids),
        answer_tokens=1,
        max_tokens=max(1, task.sampling.max_tokens - len(task.produced_token_ids)),
        priority_class=task.priority_class,
        tenant=task.tenant or "default",
        workload=task.workload,
        timeout_s=round(task.timeout_ms / 1e3 + waited_s, 6) if task.timeout_ms else None,
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
