"""Log-probabilities are those of the returned text, however it was tokenized, cut and sent."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from tokenizers import Tokenizer, decoders

from gateway.models.tokenizer import ModelTokenizer
from gateway.streaming.transcript import Transcript
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.settings.models import resolve_model_path
from sluice.v1.inference_pb2 import TokenLogprobs
from tests.gateway.kit.tokenizer import make_tokenizer
from tests.support.tiny_vocabularies import unigram

TEXTS: Final = (
    "one two three four", "a😀bé日c", "héllo wörld, naïve café", " leading and trailing ", "東京タワー hello",
    "hello 👩‍👩‍👧‍👦 world 🏳️‍🌈", "\n\n- a list\n\tof things\n", "e\u0301\u0323 a\u030a", "literal \ufffd here",
)  # fmt: skip
STOPS: Final = ((), ("three",), (" w", "é"), ("😀",), ("lo", "l wö"), ("\n",))
SEEDS: Final = range(12)


def _llama() -> Tokenizer:
    """As SentencePiece's of the Llama family: a blank before words, bytes of characters that are not known."""
    tokenizer = unigram(byte_fallback=True)
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _shipped(name: str) -> Tokenizer:
    folder = Path(resolve_model_path(f"builtin:{name}"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


KINDS: Final[dict[str, Callable[[], Tokenizer]]] = {
    "byte-level": make_tokenizer,
    "shipped small": lambda: _shipped("small"),
    "shipped large": lambda: _shipped("large"),
    "metaspace": unigram,
    "llama": _llama,
}


@cache
def served(kind: str) -> ModelTokenizer:
    tokenizer = KINDS[kind]()
    return ModelTokenizer(tokenizer, None, 4096, tokenizer.get_vocab_size(), frozenset({2}))


def logged(served: ModelTokenizer, token_ids: Sequence[int], *stops: str) -> Transcript:
    """With two alternatives for each token: itself, and its neighbour in the vocabulary."""
    made = Transcript(
        served.detokenizer(), stops, served.stop_token_ids, served.token_text, alternatives=2
    )
    for token_id in token_ids:
        if made.closed:
            break
        other = (token_id + 1) % served.vocab_size
        tops = {"top_token_ids": [token_id, other], "top_logprobs": [-0.5, -2.0]}
        made.append(token_id, Logprobs(logprob=-0.5, **tops))
    return made


def answers(served: ModelTokenizer, seed: int) -> list[list[int]]:
    """Tokens of texts, and any tokens: models also write bytes that are no characters."""
    rng = random.Random(seed)
    drawn = [rng.randrange(3, served.vocab_size) for _ in range(12)]
    return [*(served.bare(text) for text in TEXTS), drawn]


def entries_of(made: Transcript) -> list[TokenLogprobs]:
    delta = made.delta(0, True, with_tail=True)
    return [] if delta is None else list(delta.logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_join_to_the_text(kind: str) -> None:
    for seed in SEEDS:
        for token_ids in answers(served(kind), seed):
            for stops in STOPS:
                made = logged(served(kind), token_ids, *stops)
                made.close()
                entries = entries_of(made)
                assert "".join(one.text for one in entries) == made.text
                data = b"".join(one.token_bytes for one in entries)
                assert data.decode(errors="replace") == made.text


@pytest.mark.parametrize("kind", KINDS)
def test_stream_and_whole_answer_agree(kind: str) -> None:
    for token_ids in answers(served(kind), 0):
        for stops in STOPS:
            made = logged(served(kind), token_ids, *stops)
            whole = logged(served(kind), token_ids, *stops)
            whole.close()
            first = made.delta(0, True)
            streamed = [] if first is None else list(first.logprobs)
            at, text = len(made.visible_ids), "" if first is None else first.text
            made.close()
            last = made.delta(at, True, with_tail=True)
            streamed += [] if last is None else last.logprobs
            assert streamed == entries_of(whole)
            assert text + ("" if last is None else last.text) == whole.text


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_token_is_named_alike_among_its_alternatives(kind: str) -> None:
    """A reader compares texts to see whether the most probable token was drawn."""
    made = logged(served(kind), answers(served(kind), 0)[2])
    made.close()
    for token_id, entry in zip(made.token_ids, entries_of(made), strict=True):
        assert [one.token_id for one in entry.top] == [token_id, token_id + 1]
        drawn = entry.top[0]
        assert (drawn.text, drawn.token_bytes) == (entry.text, entry.token_bytes)
        assert entry.top[1].token_bytes


def test_token_that_a_stop_string_begins_in_keeps_its_part() -> None:
    small = served("shipped small")
    token_ids = small.bare("one two three")
    made = logged(small, token_ids, "three")
    entries = entries_of(made)
    assert made.closed
    assert made.text == "one two "
    shown = [one for one in entries if one.text]
    assert "".join(one.text for one in shown[:-1]) == "one two"
    assert (shown[-1].text, shown[-1].logprob, shown[-1].token_bytes) == (" ", -0.5, b" ")
    assert len(entries) == len(made.token_ids)
    assert entries[len(shown) :] == [TokenLogprobs()] * (len(entries) - len(shown))


def test_bytes_of_a_character_stand_with_their_tokens() -> None:
    llama = served("llama")
    token_ids = llama.bare("😀")
    entries = entries_of(logged(llama, token_ids))
    texts, data = [one.text for one in entries], [one.token_bytes for one in entries]
    assert (texts[-1], set(texts[:-1])) == ("😀", {""})
    assert data[-4:] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert entries[-1].top[1].token_bytes == b"\x81"
    assert entries[-1].top[1].text == "\ufffd"


def test_token_waits_for_a_stop_string_that_may_begin_in_it() -> None:
    small = served("shipped small")
    made = logged(small, small.bare("one two th"), "three")
    assert made.delta(0, True) is not None
    assert len(made.visible_ids) < len(made.token_ids)
    made.close()
    assert len(made.visible_ids) == len(made.token_ids)
    assert made.text == "one two th"


def test_token_that_ends_an_answer_has_no_text() -> None:
    small = served("shipped small")
    made = logged(small, [*small.bare("one"), 2])
    made.close()
    entry = entries_of(made)[-1]
    assert (entry.text, entry.token_bytes, entry.logprob) == ("", b"", -0.5)
