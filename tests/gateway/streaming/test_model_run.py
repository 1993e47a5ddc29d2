"""The rules of docs/internals/wire.md, Frames."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sluice.internal.v1.frame_pb2 import Frame, Logprobs
from sluice.v1.inference_pb2 import FINISH_REASON_STOP
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.runs import STALL_S, new_run


def test_frames_in_order_are_accepted() -> None:
    run = new_run()
    assert not run.was_accepted
    assert list(run.accept(frame(0, [5, 6]), 1).token_ids) == [5, 6]
    assert run.was_accepted, "a frame proves that a batcher has it"
    assert list(run.accept(last(2, [7]), 1).token_ids) == [7]
    assert run.final is not None


def test_known_tokens_of_a_frame_are_dropped() -> None:
    run = new_run()
    run.accept(frame(0, [5, 6]), 1)
    assert not run.accept(frame(0, [5, 6]), 1).token_ids
    logprobs = [Logprobs(logprob=-number) for number in range(3)]
    accepted = run.accept(frame(1, [6, 7, 8], logprobs=logprobs), 1)
    assert list(accepted.token_ids) == [7, 8]
    assert [entry.logprob for entry in accepted.logprobs] == [-1, -2]
    assert run.next_index == 4


def test_gap_is_requested_until_it_moves_or_time_passes() -> None:
    run = new_run()
    assert run.accept(frame(2, [7]), 1).has_gap
    assert not run.accept(frame(3, [8]), 1).has_gap
    assert run.accept(frame(3, [8]), 1 + STALL_S).has_gap
    run.accept(frame(0, [5]), 5)
    assert run.accept(frame(3, [8]), 5).has_gap


def test_final_frame_ends_the_run_unless_behind_a_gap() -> None:
    run = new_run()
    assert run.accept(last(2, [9]), 1).has_gap
    assert run.final is None
    run.accept(frame(0, [5, 6]), 1)
    assert not run.accept(last(2), 1).token_ids
    assert run.final is not None


@pytest.mark.parametrize("attempt", [0, 1, 3, 1000])
def test_frames_of_another_attempt_are_dropped(attempt: int) -> None:
    run = new_run()
    run.accept(frame(0, [5]), 1)
    run.start_attempt("worker")
    run.start_attempt("batcher")
    assert not run.accept(last(1, [6], attempt=attempt), 2).token_ids
    assert (run.final, run.next_index, run.accepted_attempt) == (None, 1, 0)
    assert run.accept(frame(1, [6], attempt=2), 2).is_recovered
    assert (run.recovered_from, run.accepted_attempt, run.recoveries) == ("batcher", 2, 1)
    assert not run.accept(frame(2, [7], attempt=2), 2).is_recovered


def test_first_frame_is_no_recovery() -> None:
    run = new_run()
    run.start_attempt("worker")
    assert not run.accept(frame(0, [5], attempt=1), 1).is_recovered


@given(st.data())
def test_any_delivery_yields_the_answer(data: st.DataObject) -> None:
    """Frames are lost, repeated and cut anew at random; what is requested comes; the answer is exact."""
    answer = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=30))
    tokens: list[int] = []
    run, now = new_run(), 0.0
    for _ in range(200):
        if run.final is not None:
            break
        now += STALL_S
        start = data.draw(st.integers(0, len(answer)))
        end = data.draw(st.integers(start, len(answer)))
        accepted = run.accept(_piece(answer, start, end), now)
        tokens += accepted.token_ids
        if accepted.has_gap:
            assert run.next_index == len(tokens)
            if data.draw(st.booleans()):
                tokens += run.accept(_piece(answer, len(tokens), len(answer)), now).token_ids
    assert tokens == answer[: len(tokens)]
    assert run.final is None or tokens == answer


def _piece(answer: list[int], start: int, end: int) -> Frame:
    make = last if end == len(answer) else frame
    return make(start, answer[start:end])


def test_run_of_numbers_has_no_text_at_all() -> None:
    run = new_run()
    run.open_transcript = None
    computed = last(0)
    computed.final.values = b"1234"
    run.accept(computed, 2.0)
    assert run.outcome == FINISH_REASON_STOP
    assert run.close(FINISH_REASON_STOP) == FINISH_REASON_STOP
    assert (run.completion_tokens, run.last_token_at) == (0, 2.0)
