"""What a client holds of an answer, over calls that break anywhere."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.client.answer import Delta, Event, Notice, NoticeKind, Started
from sluice.client.resumption import ResumableAnswer
from sluice.errors import InternalError
from sluice.v1 import inference_pb2 as pb
from tests.support.scripted import delta, finished, started


def exchange() -> ResumableAnswer:
    return ResumableAnswer(pb.GenerateRequest(prompt="p", idempotency_key="k"))


def play(subject: ResumableAnswer, messages: Sequence[pb.GenerateResponse]) -> list[Event]:
    return [event for message in messages for event in subject.accept(message)]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [t for event in events if isinstance(event, Delta) for t in event.token_ids]


def test_next_call_names_seed_and_tokens() -> None:
    subject = exchange()
    play(subject, [started(seed=41), delta(0, "ab")])
    request = subject.next_request()
    assert request.idempotency_key == "k"
    assert request.prompt == "p"
    assert request.resume.seed == 41
    assert list(request.resume.token_ids) == [100, 101]


def test_next_call_has_the_last_resume_token() -> None:
    subject = exchange()
    first, second, tail = delta(0, "ab"), delta(2, "c"), delta(3, "")
    first.delta.resume_token, second.delta.resume_token = b"first", b"second"
    play(subject, [started(), first, second, tail])
    assert subject.next_request().resume.resume_token == b"second"
    play(subject, [started(), first])
    assert subject.next_request().resume.resume_token == b"second"


def test_a_call_of_a_tool_that_comes_without_tokens_is_kept() -> None:
    subject, tail, again = exchange(), delta(1, "", ()), delta(0, "a")
    for piece in (tail, again):
        piece.delta.tool_calls.add(id="c", name="f", arguments="{}")
    events = play(subject, [started(), delta(0, "a"), tail])
    assert [len(one.tool_calls) for one in events if isinstance(one, Delta)] == [0, 1]
    subject.next_request()
    assert not [one for one in play(subject, [started(), again]) if isinstance(one, Delta)]


def test_reasoning_that_the_caller_has_is_not_repeated() -> None:
    subject, first, whole = exchange(), delta(0, "", (1, 2)), delta(0, "x", (1, 2, 3, 4))
    first.delta.reasoning, whole.delta.reasoning = "hm", "hm, yes"
    events = play(subject, [started(), first])
    subject.next_request()
    events += play(subject, [started(), whole, finished()])
    deltas = [one for one in events if isinstance(one, Delta)]
    assert [(one.reasoning, one.text) for one in deltas] == [("hm", ""), (", yes", "x")]


def test_second_started_is_a_notice_with_the_new_names() -> None:
    subject = exchange()
    play(subject, [started(), delta(0, "a")])
    subject.next_request()
    (event,) = play(subject, [started(request_id="r2")])
    assert isinstance(event, Notice)
    assert event.kind is NoticeKind.RECONNECTED
    assert "r2" in event.message


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([delta(0, "a")], "began without started"),
        ([started(), delta(1, "b")], "missing"),
        ([started(), delta(0, "a"), delta(2, "c")], "tokens 1 to 1"),
    ],
)
def test_stream_against_the_rules_is_an_error(
    messages: list[pb.GenerateResponse], says: str
) -> None:
    with pytest.raises(InternalError, match=says):
        play(exchange(), messages)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([started(), delta(0, "ab", token_ids=[100, 7])], "differs"),
        ([started(), delta(1, "b")], "inside a piece"),
        ([started(model="large"), delta(2, "c")], "came back from large"),
    ],
)
def test_contradiction_after_a_reconnect_is_an_error(
    messages: list[pb.GenerateResponse], says: str
) -> None:
    subject = exchange()
    play(subject, [started(), delta(0, "ab")])
    subject.next_request()
    with pytest.raises(InternalError, match=says):
        play(subject, messages)


def together(messages: Sequence[pb.GenerateResponse]) -> pb.GenerateResponse:
    """The events of `messages` in one message."""
    whole, deltas = pb.GenerateResponse(), [one.delta for one in messages if one.HasField("delta")]
    for message in messages:
        whole.MergeFrom(message)
    text = "".join(one.text for one in deltas)
    tokens = [token for one in deltas for token in one.token_ids]
    whole.delta.CopyFrom(pb.Delta(text=text, token_ids=tokens, index=deltas[0].index))
    return whole


@st.composite
def broken_answers(draw: st.DrawFn) -> tuple[str, list[int], list[list[pb.GenerateResponse]]]:
    """An answer whose text lags behind its tokens, told by calls that break and begin at a place the client knows.

    The text that is out after n tokens is the same in each call, as in a detokenizer.
    """
    pieces = draw(st.lists(st.text("xyz", max_size=3), min_size=1, max_size=12))
    tail = draw(st.text("xyz", max_size=2))
    tokens = list(range(len(pieces)))

    def call(begin: int, end: int, cuts: set[int], flushed: bool) -> list[pb.GenerateResponse]:
        marks = sorted({begin, end} | {c for c in cuts if begin < c < end})
        told = [delta(a, "".join(pieces[a:b]), token_ids=tokens[a:b]) for a, b in pairwise(marks)]
        return [started(), *told, *([delta(end, tail, token_ids=[])] if flushed else [])]

    calls, held = [], 0
    boundaries = {0}
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.sampled_from(sorted(boundaries)))
        end = draw(st.integers(begin, len(pieces)))
        cuts = draw(st.sets(st.integers(0, len(pieces))))
        flushed = end == len(pieces) and draw(st.booleans())
        calls.append(call(begin, end, cuts, flushed))
        for message in calls[-1][1:]:
            reached = message.delta.index + len(message.delta.token_ids)
            if reached >= held:
                held = reached
                boundaries.add(reached)
    begin = draw(st.sampled_from(sorted(boundaries)))
    last = [*call(begin, len(pieces), set(), flushed=True), finished()]
    calls.append([together(last)] if draw(st.booleans()) else last)
    return "".join(pieces) + tail, tokens, calls


@given(broken_answers())
def test_what_the_caller_sees_is_the_undisturbed_answer(
    case: tuple[str, list[int], list[list[pb.GenerateResponse]]],
) -> None:
    text, tokens, calls = case
    subject = exchange()
    events = []
    for messages in calls:
        subject.next_request()
        events += play(subject, messages)
    assert text_of(events) == text
    assert tokens_of(events) == tokens
    assert subject.complete
    assert sum(isinstance(event, Started) for event in events) == 1
