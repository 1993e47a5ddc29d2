"""What callers see of one answer: each token once, with the proof that it was sent."""

import pytest

from gateway.streaming.delivery import Delivery, Reader
from gateway.streaming.row import Row
from sluice.errors import Cancelled, SlowReader
from sluice.v1.inference_pb2 import Delta, Finished, GenerateResponse, Notice, Started
from sluice.wire.tokens import tokens_of
from tests.gateway.kit.rows import RESUME_KEY, Asked, new_row
from tests.gateway.streaming.test_registry import ids

FINISHED = Finished(model="m")


def attempt(text: str = "", model: str = "m", prompt_tokens: int = 3) -> Row:
    made = new_row("r1", model, prompt_tokens=prompt_tokens)
    say(made, text)
    return made


def say(made: Row, text: str) -> None:
    for token in ids(text):
        made.transcript.append(token)


def delivery(first: Row) -> Delivery:
    spec = Asked(
        event=Started(request_id="r1", model="auto", prompt_tokens=9, seed=4),
        deadline=10.0,
    )
    return Delivery(spec, first)


def reader_of(made: Delivery, index: int = 0, model: str = "", limit: int = 4) -> Reader:
    made.detach()
    reader = Reader(index, limit, lambda: None)
    made.attach(reader, model)
    return reader


def read(made: Delivery, reader: Reader, *, ended: bool = False) -> list[GenerateResponse]:
    return made.read(reader, FINISHED if ended else None, hidden=False)


def proven(delta: Delta, whole: str, model: str = "m") -> bool:
    """Whether the delta ends where ``whole`` ends, and proves it."""
    end = delta.index + len(delta.token_ids)
    return end == len(whole) and RESUME_KEY.issued(delta.resume_token, b"f", model, 4, ids(whole))


def test_deltas_follow_each_other_and_each_proves_all_before_it() -> None:
    first = attempt("ab")
    made = delivery(first)
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
    assert reader.index == 4


def test_a_caller_that_comes_again_has_the_same_tokens_and_proof() -> None:
    first = attempt("ab")
    made = delivery(first)
    read(made, reader_of(made))
    say(first, "c")
    for held, text in ((0, "abc"), (1, "bc"), (2, "c")):
        (event,) = read(made, reader_of(made, held))
        assert (event.delta.text, event.delta.index) == (text, held)
        assert proven(event.delta, "abc")
    say(first, "d")
    stored = made.stored(FINISHED)
    assert stored.delta.text == "abcd"
    assert proven(stored.delta, "abcd")
    assert list(stored.text_lengths) == [1, 1, 1, 1]
    assert stored.started.prompt_tokens == 3


def test_held_tokens_are_the_beginning_or_of_a_model_that_was_replaced() -> None:
    made = delivery(attempt("abc"))
    for held in ("", "a", "abc"):
        assert made.matches(ids(held), "m")
        assert made.matches(ids(held), "")
    for held in ("b", "ac", "abcd"):
        assert not made.matches(ids(held), "m")
        assert not made.matches(ids(held), "other")
    made.restart(attempt("x", "large", 7), Notice(message="escalated"))
    assert made.matches(ids("anything"), "m")
    assert made.matches(ids("x"), "large")
    assert not made.matches(ids("y"), "large")
    assert not made.matches(ids("y"), "third")


def test_the_first_event_is_of_the_model_whose_tokens_the_caller_holds() -> None:
    made = delivery(attempt("abc"))
    assert (made.started("m").model, made.started("m").prompt_tokens) == ("m", 3)
    assert (made.started("").request_id, made.started("").seed) == ("r1", 4)
    made.restart(attempt("x", "large", 7), Notice(message="escalated"))
    assert not made.replaced("large")
    assert not made.replaced("third")
    assert made.replaced("m")
    for model, expected in (("m", ("m", 3)), ("", ("large", 7)), ("third", ("large", 7))):
        started = made.started(model)
        assert (started.model, started.prompt_tokens) == expected
    # It comes back: what it said before is void, and it is not replaced any more.
    made.restart(attempt("y", "m", 4), Notice(message="again"))
    assert not made.replaced("m")
    assert (made.started("m").model, made.started("m").prompt_tokens) == ("m", 4)
    replaced = {one.model: one.prompt_tokens for one in made.stored(FINISHED).replaced}
    assert replaced == {"large": 7}


def test_a_restart_begins_with_its_notice_and_all_of_the_new_answer() -> None:
    made = delivery(attempt("abc"))
    reader = reader_of(made)
    made.notify(Notice(message="waits"))
    read(made, reader)
    made.restart(attempt("xy", "large", 7), Notice(message="escalated"))
    made.notify(Notice(message="later"))
    notice, later, event = read(made, reader)
    assert (notice.notice.message, later.notice.message) == ("escalated", "later")
    assert (event.delta.text, event.delta.index) == ("xy", 0)
    assert proven(event.delta, "xy", "large")
    # A caller that comes again with tokens of the first model begins at the restart.
    events = read(made, reader_of(made, 2, "m"))
    assert [one.WhichOneof("event") for one in events] == ["notice", "notice", "delta"]
    assert (events[0].notice.message, events[2].delta.text) == ("escalated", "xy")
    # One with tokens of the second goes on behind them, and has heard all notices.
    (event,) = read(made, reader_of(made, 1, "large"))
    assert event.delta.text == "y"
    assert made.stored(FINISHED).restart_notice == 1


def test_one_call_reads_at_a_time() -> None:
    made = delivery(attempt("abc"))
    first = reader_of(made)
    with pytest.raises(AssertionError, match="one reader"):
        made.attach(Reader(0, 4, lambda: None), "")
    assert made.detach() is first
    assert made.detach() is None


def test_what_was_there_before_the_call_is_not_its_fault() -> None:
    first = attempt("a" * 20)
    made = delivery(first)
    reader = reader_of(made, 2, limit=4)
    assert made.show_since(20) is None
    say(first, "b" * 4)
    assert made.show_since(20) is None
    say(first, "c")
    assert isinstance(made.show_since(24), SlowReader)
    read(made, reader)
    say(first, "d" * 4)
    assert made.show_since(25) is None


def test_a_call_that_is_displaced_ends_with_the_error() -> None:
    stopped = list[Exception]()
    reader = Reader(0, 4, lambda: None, stopped.append)
    error = Cancelled("a newer call")
    reader.displace(error)
    assert (reader.displaced_by, stopped) == (error, [error])


def test_what_rules_withhold_is_shown_as_far_as_it_was_and_no_further() -> None:
    first = attempt("abcd")
    made = delivery(first)
    read(made, reader_of(made))
    say(first, "secret")
    made.withhold(("rule",))
    assert made.withheld_by == ("rule",)
    events = read(made, reader_of(made), ended=True)
    assert [one.WhichOneof("event") for one in events] == ["delta", "finished"]
    assert events[0].delta.text == "abcd"
    assert proven(events[0].delta, "abcd")
    stored = made.stored(FINISHED)
    assert (stored.delta.text, list(stored.text_lengths)) == ("abcd", [1] * 4)


def test_what_a_caller_holds_already_is_not_withheld_from_it() -> None:
    first = attempt("abcd")
    made = delivery(first)
    reader_of(made, 3)
    made.withhold(("rule",))
    (event,) = read(made, reader_of(made))
    assert event.delta.text == "abc"
    other = delivery(attempt("abcd"))
    other.withhold(("rule",))
    assert read(other, reader_of(other)) == []


def test_what_was_delivered_of_a_void_answer_does_not_count_for_the_next() -> None:
    made = delivery(attempt("abcd"))
    read(made, reader_of(made))
    made.restart(attempt("secret", "large"), Notice())
    made.withhold(("rule",))
    events = read(made, reader_of(made))
    assert [one.WhichOneof("event") for one in events] == []
    assert made.stored(FINISHED).delta.text == ""


def test_while_the_answer_is_hidden_notices_are_read_alone() -> None:
    made = delivery(attempt("abc"))
    reader = reader_of(made)
    made.notify(Notice(message="waits"))
    (notice,) = made.read(reader, FINISHED, hidden=True)
    assert (notice.notice.message, reader.index) == ("waits", 0)
    assert made.read(reader, None, hidden=True) == []
    delta, finished = read(made, reader, ended=True)
    assert (delta.delta.text, finished.finished) == ("abc", FINISHED)
    assert made._delivered == 3


def test_a_caller_behind_the_end_gets_the_end() -> None:
    made = delivery(attempt("abc"))
    reader = reader_of(made, 5)
    (finished,) = read(made, reader, ended=True)
    assert finished.finished == FINISHED
    assert reader.index == 5


def test_text_that_no_token_released_comes_with_the_end() -> None:
    first = attempt("abc")
    first.transcript.tail = "!"
    made = delivery(first)
    reader = reader_of(made)
    read(made, reader)
    tail, finished = read(made, reader, ended=True)
    assert (tail.delta.text, tail.delta.index, len(tail.delta.token_ids)) == ("!", 3, 0)
    assert finished.finished == FINISHED
    made.withhold(("rule",))
    (finished,) = read(made, reader_of(made, 3), ended=True)
    assert finished.HasField("finished")
