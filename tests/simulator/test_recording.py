"""A recording holds what passed, once, with lengths and times, and no tokens."""

from simulator.trace import Arrival, Recording, format_line, parse_trace
from sluice.internal.v1 import frame_pb2, task_pb2


def task(request_id: str = "a", **values: object) -> task_pb2.Task:
    given = {
        "request_id": request_id,
        "model": "small",
        "tenant": "acme",
        "workload": "reply",
        "priority_class": "interactive",
        "prompt_token_ids": [7] * 12,
        "timeout_ms": 30_000,
    }
    made = task_pb2.Task(**{**given, **values})  # type: ignore[arg-type]
    made.sampling.max_tokens = 64
    return made


def frame(start: int, tokens: int, request_id: str = "a", final: bool = False) -> frame_pb2.Frame:
    made = frame_pb2.Frame(request_id=request_id, start_index=start, token_ids=[7] * tokens)
    if final:
        made.final.end = frame_pb2.TASK_END_STOP
    return made


def test_a_request_is_recorded_at_its_end() -> None:
    recording = Recording(began=100.0)
    recording.task(task(), 101.5)
    assert recording.frames([frame(0, 1)], 101.75) == []
    assert recording.frames([frame(1, 3)], 102.0) == []
    (arrival,) = recording.frames([frame(4, 1, final=True)], 102.5)
    assert arrival == Arrival(
        at_s=1.5,
        prompt_tokens=12,
        answer_tokens=5,
        max_tokens=64,
        priority_class="interactive",
        tenant="acme",
        workload="reply",
        timeout_s=30.0,
        model="small",
        ttft_s=0.25,
        latency_s=1.0,
    )
    assert len(recording) == 0
    assert parse_trace([format_line(arrival)]) == [arrival]


def test_admission_wait_is_part_of_recorded_times() -> None:
    recording = Recording(began=100.0)
    recording.task(task(waited_us=500_000), 101.5)
    recording.task(task("b", waited_us=2_000_000), 101.5)
    (arrival,) = recording.frames([frame(0, 1, final=True)], 101.75)
    assert (arrival.at_s, arrival.ttft_s, arrival.latency_s) == (1.0, 0.75, 0.75)
    assert arrival.timeout_s == 30.5
    (arrival,) = recording.frames([frame(0, 1, "b", final=True)], 101.75)
    assert (arrival.at_s, arrival.ttft_s) == (0.0, 2.25), "it came before the recording began"


def test_repeated_messages_count_once() -> None:
    recording = Recording(began=0.0)
    recording.task(task(), 1.0)
    recording.task(task(), 2.0)
    recording.frames([frame(0, 3), frame(0, 3), frame(1, 2)], 3.0)
    (arrival,) = recording.frames([frame(3, 0, final=True), frame(3, 0, final=True)], 4.0)
    assert (arrival.at_s, arrival.answer_tokens, arrival.ttft_s) == (1.0, 3, 2.0)


def test_tokens_that_exist_already_are_part_of_the_prompt() -> None:
    recording = Recording(began=0.0)
    recording.task(task(produced_token_ids=[1] * 10), 1.0)
    (arrival,) = recording.frames([frame(10, 4, final=True)], 2.0)
    assert (arrival.prompt_tokens, arrival.answer_tokens, arrival.max_tokens) == (22, 4, 54)


def test_what_ended_without_a_token_was_one_request_all_the_same() -> None:
    recording = Recording(began=0.0)
    recording.task(task(timeout_ms=0), 1.0)
    (arrival,) = recording.frames([frame(0, 0, final=True)], 2.0)
    assert (arrival.answer_tokens, arrival.ttft_s, arrival.timeout_s) == (1, None, None)


def test_frames_of_others_are_not_for_us() -> None:
    recording = Recording(began=0.0)
    assert recording.frames([frame(0, 1, "unknown", final=True)], 1.0) == []


def test_requests_under_way_are_bounded() -> None:
    recorded = Recording(began=0.0, pending_max=3)
    for number in range(5):
        recorded.task(task_pb2.Task(request_id=str(number)), 0.0)
    assert len(recorded) == 3
    assert recorded.dropped == 2
