"""Tokens to text: whole characters only, stop strings anywhere, and any starting point."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gateway.models.tokenizer import ModelTokenizer
from gateway.streaming.transcript import Transcript
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.v1.inference_pb2 import TokenLogprobs
from tests.gateway.kit.tokenizer import END, SYSTEM, USER, id_of, make_tokenizer

TOKENIZER = make_tokenizer()
END_ID = id_of(TOKENIZER, END)
TOKENS = ModelTokenizer(TOKENIZER, None, 256, TOKENIZER.get_vocab_size(), frozenset({END_ID}))


def transcript(*stops: str) -> Transcript:
    return Transcript(TOKENS.detokenizer(), stops, TOKENS.stop_token_ids, TOKENS.token_text)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def filled(token_ids: list[int], *stops: str) -> Transcript:
    made = transcript(*stops)
    for token_id in token_ids:
        if made.closed:
            break
        made.append(token_id)
    made.close()
    return made


def text_from(made: Transcript, start: int) -> str:
    delta = made.delta(start, False, with_tail=True)
    return delta.text if delta else ""


@given(st.text(max_size=30))
def test_all_text_comes_out_whole(text: str) -> None:
    made = filled(ids(text))
    assert text_from(made, 0) == text


@given(st.text(max_size=20), st.data())
def test_no_delta_ends_inside_a_character(text: str, data: st.DataObject) -> None:
    """Every split of the tokens gives the same text, and never a replacement character."""
    token_ids, made, shown = ids(text), transcript(), ""
    for token_id in token_ids:
        start = len(made.token_ids)
        made.append(token_id)
        delta = made.delta(start, False)
        assert delta is not None
        assert "�" not in delta.text or "�" in text
        shown += delta.text
    made.close()
    assert shown + text_from(made, len(token_ids)) == text


@given(st.text(alphabet="ab é😀", max_size=20), st.text(alphabet="ab é", min_size=1, max_size=3))
def test_a_stop_string_is_found_wherever_tokens_split_it(text: str, stop: str) -> None:
    made = filled(ids(text), stop)
    at = text.find(stop)
    assert text_from(made, 0) == (text if at < 0 else text[:at])
    assert made.stop == (None if at < 0 else stop)


@given(st.text(alphabet="ab é😀", max_size=20), st.data())
def test_every_starting_point_continues_exactly(text: str, data: st.DataObject) -> None:
    token_ids = ids(text)
    made = filled(token_ids, "zz", "ba")
    held = data.draw(st.integers(0, len(made.token_ids)))
    before = transcript("zz", "ba")
    shown = ""
    for token_id in made.token_ids[:held]:
        before.append(token_id)
    if held:
        delta = before.delta(0, False)
        assert delta is not None
        shown = delta.text
    assert shown + text_from(made, held) == text_from(made, 0)


def test_bytes_that_are_no_character_are_shown_at_the_end() -> None:
    token_id = ids("é")[0]
    made = transcript()
    made.append(token_id)
    delta = made.delta(0, False)
    assert delta is not None
    assert delta.text == ""
    made.close()
    tail = made.delta(1, False, with_tail=True)
    assert tail is not None
    assert (tail.text, tail.index) == ("�", 1)
    assert not tail.token_ids


def test_a_stop_token_is_reported_without_text() -> None:
    made = filled([*ids("hello"), END_ID])
    delta = made.delta(0, False)
    assert delta is not None
    assert delta.text == "hello"
    assert delta.token_ids[-1] == END_ID


@pytest.mark.parametrize("alternatives", [2, None])
def test_logprobs_are_kept_for_callers_that_want_them(alternatives: int | None) -> None:
    made = Transcript(
        TOKENS.detokenizer(), (), frozenset(), TOKENS.token_text, alternatives=alternatives
    )
    (token_id,) = ids("hello")[:1]
    tops = [token_id, END_ID]
    made.append(token_id, Logprobs(logprob=-0.5, top_token_ids=tops, top_logprobs=[-0.5, -2]))
    delta, without = made.delta(0, True), made.delta(0, False)
    assert delta is not None
    assert without is not None
    assert not without.logprobs
    (entry,) = delta.logprobs
    if alternatives is None:
        assert entry == TokenLogprobs()
    else:
        assert entry.logprob == pytest.approx(-0.5)
        assert [top.text for top in entry.top] == [TOKENS.token_text(token_id).text, END]


@pytest.mark.parametrize("text", ["", "hello wo"])
def test_stop_string_that_is_a_special_token_stops(text: str) -> None:
    """Other special tokens have no text, as in all answers."""
    user = id_of(TOKENIZER, USER)
    made = Transcript(
        TOKENS.detokenizer(stops=[USER]), [USER], TOKENS.stop_token_ids, TOKENS.token_text
    )
    for token_id in [*ids(text), id_of(TOKENIZER, SYSTEM), user]:
        made.append(token_id)
    assert (made.closed, made.stop, made.text) == (True, USER, text)
    assert made.token_ids[-1] == user
