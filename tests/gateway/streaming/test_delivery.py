"""What callers see of one answer: each token once, with the proof that it was sent."""

import pytest

from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.idempotency import ReplayCache
from gateway.streaming.model_run import ModelRun
from gateway.streaming.registry import Registry
from sluice.errors import Cancelled, SlowReader, SluiceError
from sluice.internal.v1.frame_pb2 import Frame
from sluice.internal.v1.gateway_pb2 import StoredAnswer
from sluice.v1.inference_pb2 import Delta, Finished, GenerateResponse, Notice, Started
from sluice.wire.tokens import tokens_of
from tests.gateway.kit import runs
from tests.gateway.kit.runs import RESUME_KEY, Asked, dispatch_to, new_run
from tests.gateway.streaming.test_registry import ids
from tests.support.events import kinds_of

FINISHED = Finished(model="m")


def attempt(
    text: str = "", model: str = "m", prompt_tokens: int = 3, run_id: str = "r1"
) -> ModelRun:
    made = new_run(run_id, model, prompt_tokens=prompt_tokens)
    say(made, text)
    return made


def say(made: ModelRun, text: str) -> None:
    for token in ids(text):
        made.transcript.append(token)


def answer_of(first: ModelRun) -> AnswerStream:
    asked = Asked(event=Started(request_id="r1", model="auto", prompt_tokens=9, seed=4))
    return AnswerStream(Registry(dispatch_to(), ReplayCache(2, 60)), asked, first)


def escalated(made: AnswerStream, text: str, model: str, prompt_tokens: int = 3) -> None:
    """Another model answers from now on."""
    run = attempt(text, model, prompt_tokens, f"r{len(made.runs) + 1}")
    assert made.reroute(run, "escalated")


def reader_of(made: AnswerStream, index: int = 0, model: str = "", limit: int = 4) -> int:
    return made.join(index, limit, lambda: None, model=model)


def read(made: AnswerStream, reader: int, *, ended: bool = False) -> list[GenerateResponse]:
    if ended:
        made.finished = FINISHED
    return runs.read(made, reader)


def stored_of(made: AnswerStream) -> StoredAnswer:
    made.finished = FINISHED
    return made.record().answer


def proven(delta: Delta, whole: str, model: str = "m") -> bool:
    """Whether the delta ends where ``whole`` ends, and proves it."""
    end = delta.index + len(delta.token_ids)
    return end == len(whole) and RESUME_KEY.issued(delta.resume_token, b"f", model, 4, ids(whole))


def test_deltas_follow_each_other_and_each_proves_all_before_it() -> None:
    first = attempt("ab")
    made = answer_of(first)
    reader = reader_of(made)
    (event,) = read(made, reader)
    assert (event.delta.text, event.delta.index) == ("ab", 0)
    assert proven(event.delta, "ab")
    assert read(made, reader) == []
    say(first, "c")
    say(first, "d")
    (event,) = read(made, reader)
    assert (event.delta.text, event.delta.index, tokens_of(event.delta)) == ("cd", 2, (99, 100))
    assert proven(event.delta, "abcd")
    assert made.read_index == 4


def test_a_caller_that_comes_again_has_the_same_tokens_and_proof() -> None:
    first = attempt("ab")
    made = answer_of(first)
    read(made, reader_of(made))
    say(first, "c")
    for held, text in ((0, "abc"), (1, "bc"), (2, "c")):
        (event,) = read(made, reader_of(made, held))
        assert (event.delta.text, event.delta.index) == (text, held)
        assert proven(event.delta, "abc")
    say(first, "d")
    stored = stored_of(made)
    assert stored.delta.text == "abcd"
    assert proven(stored.delta, "abcd")
    assert list(stored.text_lengths) == [1, 1, 1, 1]
    assert stored.started.prompt_tokens == 3


def test_held_tokens_match_the_answer_or_a_replaced_model() -> None:
    made = answer_of(attempt("abc"))
    for held in ("", "a", "abc"):
        assert made.matches(ids(held), "m")
        assert made.matches(ids(held), "")
    for held in ("b", "ac", "abcd"):
        assert not made.matches(ids(held), "m")
        assert not made.matches(ids(held), "other")
    escalated(made, "x", "large", 7)
    assert made.matches(ids("anything"), "m")
    assert made.matches(ids("x"), "large")
    assert not made.matches(ids("y"), "large")
    assert not made.matches(ids("y"), "third")


def started_of(made: AnswerStream, model: str) -> tuple[str, int]:
    made.accept_task(made.current.run_id)
    started = made.started(reader_of(made), model)
    assert started is not None
    return started.model, started.prompt_tokens


def test_started_names_the_model_of_the_held_tokens() -> None:
    made = answer_of(attempt("abc"))
    assert started_of(made, "m") == ("m", 3)
    first = made.started(reader_of(made), "")
    assert first is not None
    assert (first.request_id, first.seed) == ("r1", 4)
    escalated(made, "x", "large", 7)
    for model, expected in (("m", ("m", 3)), ("", ("large", 7)), ("third", ("large", 7))):
        assert started_of(made, model) == expected
    # It comes back: what it said before is void, and it is not replaced any more.
    escalated(made, "y", "m", 4)
    assert not made.matches(ids("x"), "m")
    assert started_of(made, "m") == ("m", 4)
    replaced = {one.model: one.prompt_tokens for one in stored_of(made).replaced}
    assert replaced == {"large": 7}


def test_a_restart_begins_with_its_notice_and_all_text() -> None:
    made = answer_of(attempt("abc"))
    reader = reader_of(made)
    made.notices.append(Notice(message="waits"))
    read(made, reader)
    escalated(made, "xy", "large", 7)
    made.notices.append(Notice(message="later"))
    notice, later, event = read(made, reader)
    assert notice.notices[0].model == "large"
    assert later.notices[0].message == "later"
    assert (event.delta.text, event.delta.index) == ("xy", 0)
    assert proven(event.delta, "xy", "large")
    # A caller that comes again with tokens of the first model begins at the restart.
    events = read(made, reader_of(made, 2, "m"))
    assert kinds_of(events) == ["notices", "notices", "delta"]
    assert (events[0].notices[0].model, events[2].delta.text) == ("large", "xy")
    # One with tokens of the second goes on behind them, and has heard all notices.
    (event,) = read(made, reader_of(made, 1, "large"))
    assert event.delta.text == "y"
    assert stored_of(made).restart_notice == 1


def test_one_call_reads_at_a_time() -> None:
    made, stopped = answer_of(attempt("abc")), list[SluiceError]()
    first = made.join(0, 4, lambda: None, stopped.append)
    second = reader_of(made)
    assert [type(error) for error in stopped] == [Cancelled]
    with pytest.raises(Cancelled):
        made.read(first)
    made.leave(first)
    assert (made.is_read, made.has_ended) == (True, False)
    assert [event.delta.text for event in read(made, second)] == ["abc"]
    made.leave(second)
    assert (made.is_read, made.has_ended) == (False, True)


def test_what_was_there_before_the_call_is_not_its_fault() -> None:
    first = new_run("r1")
    made = answer_of(first)

    def arrive(text: str) -> None:
        frame = Frame(request_id="r1", start_index=first.next_index, token_ids=ids(text))
        made.accept(frame, 1.0)

    arrive("a" * 20)
    reader = reader_of(made, 2, limit=4)
    arrive("b" * 4)
    read(made, reader)
    arrive("d" * 4)
    assert made.error is None
    arrive("e" * 5)
    assert isinstance(made.error, SlowReader)


def test_what_rules_withhold_is_shown_no_further() -> None:
    first = attempt("abcd")
    made = answer_of(first)
    read(made, reader_of(made))
    say(first, "secret")
    made.block(("rule",), 1.0)
    assert made.withheld_by == ("rule",)
    events = read(made, reader_of(made))
    assert kinds_of(events) == ["delta", "finished"]
    assert events[0].delta.text == "abcd"
    assert proven(events[0].delta, "abcd")
    stored = stored_of(made)
    assert (stored.delta.text, list(stored.text_lengths)) == ("abcd", [1] * 4)


def test_what_a_caller_holds_already_is_not_withheld_from_it() -> None:
    first = attempt("abcd")
    made = answer_of(first)
    reader_of(made, 3)
    made.block(("rule",), 1.0)
    event, _ = read(made, reader_of(made))
    assert event.delta.text == "abc"
    other = answer_of(attempt("abcd"))
    other.block(("rule",), 1.0)
    assert kinds_of(read(other, reader_of(other))) == ["finished"]


def test_delivery_of_a_void_answer_does_not_count() -> None:
    made = answer_of(attempt("abcd"))
    read(made, reader_of(made))
    escalated(made, "secret", "large")
    made.block(("rule",), 1.0)
    events = read(made, reader_of(made))
    assert kinds_of(events) == ["finished"]
    assert stored_of(made).delta.text == ""


def test_while_the_answer_is_hidden_notices_are_read_alone() -> None:
    made = answer_of(attempt("abc"))
    reader = reader_of(made)
    made.notices.append(Notice(message="waits"))
    made.is_held = True
    (notice,) = read(made, reader)
    assert (notice.notices[0].message, made.read_index) == ("waits", 0)
    assert made.read(reader) is None
    made.is_held = False
    delta, finished = read(made, reader, ended=True)
    assert (delta.delta.text, finished.finished) == ("abc", FINISHED)


def test_a_caller_behind_the_end_gets_the_end() -> None:
    made = answer_of(attempt("abc"))
    reader = reader_of(made, 5)
    (finished,) = read(made, reader, ended=True)
    assert finished.finished == FINISHED
    assert made.read_index == 5


def test_text_that_no_token_released_comes_with_the_end() -> None:
    first = attempt("abc")
    first.transcript.tail = "!"
    made = answer_of(first)
    reader = reader_of(made)
    read(made, reader)
    tail, finished = read(made, reader, ended=True)
    assert (tail.delta.text, tail.delta.index, len(tail.delta.token_ids)) == ("!", 3, 0)
    assert finished.finished == FINISHED
    made.finished = None
    made.block(("rule",), 1.0)
    (finished,) = read(made, reader_of(made, 3), ended=True)
    assert finished.HasField("finished")
