"""The rules of docs/internals/wire.md, Frames."""

import hypothesis.strategies as st
from hypothesis import given

from gateway.streaming.row import Row
from gateway.streaming.transcript import Transcript
from sluice.internal.v1.frame_pb2 import Frame, Logprobs
from sluice.settings import ModelSettings
from sluice.v1.inference_pb2 import FINISH_REASON_STOP
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.rows import new_row

STALL_S = 3.0


def test_frames_in_order_are_taken() -> None:
    a = new_row(stall_s=STALL_S)
    assert not a.taken
    assert list(a.accept(frame(0, [5, 6]), 1).token_ids) == [5, 6]
    assert a.taken, "a frame proves that a batcher has it"
    assert list(a.accept(last(2, [7]), 1).token_ids) == [7]
    assert a.final is not None


def test_a_duplicate_is_dropped() -> None:
    a = new_row(stall_s=STALL_S)
    a.accept(frame(0, [5, 6]), 1)
    assert not a.accept(frame(0, [5, 6]), 1).token_ids
    assert a.next_index == 2


def test_known_tokens_at_the_start_of_a_frame_are_dropped() -> None:
    a = new_row(stall_s=STALL_S)
    a.accept(frame(0, [5, 6]), 1)
    assert list(a.accept(frame(1, [6, 7, 8]), 1).token_ids) == [7, 8]


def test_a_gap_is_requested_once_until_it_moves_or_time_passes() -> None:
    a = new_row(stall_s=STALL_S)
    assert a.accept(frame(2, [7]), 1).gap
    assert not a.accept(frame(3, [8]), 1).gap
    assert a.accept(frame(3, [8]), 1 + STALL_S).gap
    a.accept(frame(0, [5]), 5)
    assert a.accept(frame(3, [8]), 5).gap


def test_a_final_frame_beyond_a_gap_does_not_end_the_answer() -> None:
    a = new_row(stall_s=STALL_S)
    assert a.accept(last(3, [9]), 1).gap
    assert a.final is None


def test_a_final_frame_without_new_tokens_ends_the_answer() -> None:
    a = new_row(stall_s=STALL_S)
    a.accept(frame(0, [5, 6]), 1)
    assert not a.accept(last(2), 1).token_ids
    assert a.final is not None


def test_an_earlier_attempt_is_fenced_out() -> None:
    a = new_row(stall_s=STALL_S)
    a.accept(frame(0, [5], attempt=1), 1)
    assert not a.accept(frame(1, [6], attempt=0), 1).token_ids
    taken = a.accept(frame(1, [6], attempt=1000), 1)
    assert taken.recovered
    assert list(taken.token_ids) == [6]


def test_the_first_frame_is_not_a_recovery() -> None:
    assert not new_row(stall_s=STALL_S).accept(frame(0, [5], attempt=1000), 1).recovered


def test_a_fence_drops_what_the_earlier_owner_sends_and_the_next_one_recovers() -> None:
    a = new_row(stall_s=STALL_S)
    a.accept(frame(0, [5]), 1)
    a.fence(999, "worker")
    a.fence(1000, "batcher")
    assert not a.accept(frame(1, [6], attempt=999), 2).token_ids
    assert a.accept(frame(1, [6], attempt=1000), 2).recovered
    assert a.recovered_from == "batcher"
    assert not a.accept(frame(2, [7], attempt=1000), 2).recovered


def test_logprobs_of_known_tokens_are_dropped_too() -> None:
    a = new_row(stall_s=STALL_S)
    a.accept(frame(0, [5]), 1)
    taken = a.accept(frame(0, [5, 6], logprobs=[Logprobs(logprob=-1), Logprobs(logprob=-2)]), 1)
    assert [entry.logprob for entry in taken.logprobs] == [-2]


@given(st.data())
def test_any_delivery_yields_the_answer_as_long_as_gaps_are_resent(data: st.DataObject) -> None:
    """Frames are lost, repeated and cut anew at random; what is asked for comes; the answer is exact."""
    answer = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=30))
    got: list[int] = []
    a, ended, now = new_row(stall_s=STALL_S), False, 0.0
    for _ in range(200):
        if ended:
            break
        now += STALL_S
        start = data.draw(st.integers(0, len(answer)))
        end = data.draw(st.integers(start, len(answer)))
        got, ended, gap = _take(a, got, _piece(answer, start, end), now)
        if gap:
            resend = a.next_index
            assert resend == len(got)
            if data.draw(st.booleans()):
                got, ended, _ = _take(a, got, _piece(answer, resend, len(answer)), now)
    assert got == answer[: len(got)]
    assert not ended or got == answer


def _piece(answer: list[int], start: int, end: int) -> Frame:
    make = last if end == len(answer) else frame
    return make(start, answer[start:end])


def _take(a: Row, got: list[int], sent: Frame, now: float) -> tuple[list[int], bool, bool]:
    taken = a.accept(sent, now)
    return [*got, *taken.token_ids], a.final is not None, taken.gap


def test_a_row_that_waits_has_no_text_yet() -> None:
    opened, row = [], new_row()
    open_text = row.open_text
    assert open_text is not None

    def counted() -> Transcript:
        opened.append(row.row_id)
        return open_text()

    row.open_text = counted
    assert (row.token_ids, row.shown, row.completion_tokens, row.outcome()) == ((), 0, 0, None)
    row.accept(frame(2, [7]), 1)  # nothing of it is known to be next
    assert not opened
    row.accept(frame(0, [97]), 1)
    row.accept(last(1, [98]), 1)
    assert (row.transcript.text, opened) == ("ab", ["r1"])


def test_a_row_of_numbers_has_no_text_at_all() -> None:
    row = Row("r1", "m", 3, None, STALL_S, 0.0, ModelSettings(name="m", path="m"))
    computed = last(0)
    computed.final.values = b"1234"
    row.accept(computed, 2.0)
    outcome = row.outcome()
    assert outcome == FINISH_REASON_STOP
    assert row.close(FINISH_REASON_STOP) == FINISH_REASON_STOP
    assert (row.completion_tokens, row.last_token_at) == (0, 2.0)
