"""A recording holds what passed, once, with lengths and times, and no tokens."""

from dataclasses import replace

import pytest

from simulator.trace import Arrival, Recording, format_line, parse_trace
from sluice.internal.v1.frame_pb2 import TASK_END_STOP, Frame, TaskRef
from sluice.internal.v1.task_pb2 import Task

Event = Task | Frame | TaskRef


def task(**values: object) -> Task:
    given = {
        "request_id": "a",
        "model": "small",
        "tenant": "acme",
        "workload": "reply",
        "priority_class": "interactive",
        "prompt_token_ids": [7] * 12,
        "timeout_ms": 30_000,
    }
    made = Task(**{**given, **values})  # type: ignore[arg-type]
    made.sampling.max_tokens = 64
    return made


def frame(start: int, tokens: int, request_id: str = "a", final: bool = False) -> Frame:
    made = Frame(request_id=request_id, start_index=start, token_ids=[7] * tokens)
    if final:
        made.final.end = TASK_END_STOP
    return made


def cancel(attempt: int = 0) -> TaskRef:
    return TaskRef(request_id="a", attempt=attempt)


def recorded(*events: tuple[float, Event]) -> tuple[Recording, list[Arrival]]:
    """The recording of events that happen at a time, and what has ended, cancelled ones last."""
    recording, ended = Recording(began=100.0), list[Arrival]()
    for at, event in events:
        if isinstance(event, Task):
            recording.task(event, at)
        elif isinstance(event, Frame):
            ended += recording.frames([event], at)
        else:
            recording.cancel([event], at)
    return recording, ended + recording.cancelled(999.0)


TASK, END = (101.5, task()), (102.5, frame(4, 1, final=True))
FIRST, WHOLE = (101.75, frame(0, 4)), (101.75, frame(0, 5, final=True))
SHOWN = Arrival(1.5, 12, 5, 64, "interactive", "acme", "reply", 30.0, "small", 0.25, 1.0)
WAITED = {"timeout_s": 30.5, "ttft_s": 0.75, "latency_s": 0.75}
EARLIER = {"timeout_s": 32.0, "ttft_s": 2.25, "latency_s": 2.25}
NO_TOKEN = {"answer_tokens": 1, "ttft_s": None, "timeout_s": None}
AFTER = {"prompt_tokens": 22, "max_tokens": 54}
PRODUCED = (101.5, task(produced_token_ids=[1] * 10))


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        ([TASK, FIRST, END], {}),
        ([(101.5, task(waited_us=500_000)), WHOLE], {"at_s": 1.0, **WAITED}),
        ([(101.5, task(waited_us=2_000_000)), WHOLE], {"at_s": 0.0, **EARLIER}),
        ([TASK, TASK, FIRST, FIRST, END, END], {}),
        ([PRODUCED, (101.75, frame(10, 4)), (102.5, frame(14, 1, final=True))], AFTER),
        ([(101.5, task(timeout_ms=0)), (102.5, frame(0, 0, final=True))], NO_TOKEN),
        ([TASK, FIRST, (102.5, cancel()), (103, cancel())], {"answer_tokens": 4}),
        ([TASK, (101.6, cancel()), (101.7, task(attempt=1)), FIRST, (102, cancel()), END], {}),
    ],
    ids=["whole", "waited", "before", "repeated", "produced", "no-token", "cancelled", "sent-again"],
)  # fmt: skip
def test_a_request_is_recorded_at_its_end(
    events: list[tuple[float, Event]], shown: dict[str, object]
) -> None:
    recording, (arrival,) = recorded(*events)
    assert arrival == replace(SHOWN, **shown)  # type: ignore[arg-type]
    assert len(recording) == 0
    assert parse_trace([format_line(arrival)]) == [arrival]


@pytest.mark.parametrize(
    "event", [frame(0, 1, "unknown", final=True), TaskRef(request_id="unknown"), task(attempt=1)]
)
def test_what_began_before_the_recording_is_left_out(event: Event) -> None:
    assert recorded((101.0, event), END)[1] == []


def test_a_cancelled_request_ends_when_it_is_not_sent_again() -> None:
    recording = Recording(began=0.0)
    recording.task(task(), 1.0)
    recording.cancel([cancel()], 3.0)
    assert (len(recording), recording.cancelled(3.0)) == (0, [])
    assert [len(recording.cancelled(before)) for before in (3.5, 9.0)] == [1, 0]


def test_requests_under_way_are_bounded() -> None:
    recording = Recording(began=0.0, pending_max=3)
    for number in range(5):
        recording.task(Task(request_id=str(number)), 0.0)
    assert (len(recording), recording.dropped) == (3, 2)
