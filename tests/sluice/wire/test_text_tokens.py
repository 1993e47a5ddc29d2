"""Text as token ids without loss."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.models.tokenizer import Detokenizer
from sluice.errors import SettingsError
from sluice.settings import resolve_model_path
from sluice.wire.text_tokens import CONVERSATION, END, load_text_tokens

FILE = Path(resolve_model_path("builtin:small"), "tokenizer.json")
TOKENS = load_text_tokens(FILE)
PIECES = st.lists(st.text() | st.sampled_from([CONVERSATION, END, "<|user|>", "<|", "e\u0301"]))


@given(PIECES)
def test_every_text_comes_back_whatever_its_pieces(pieces: list[str]) -> None:
    token_ids = [token_id for piece in pieces for token_id in TOKENS.encode(piece)]
    assert TOKENS.decode(token_ids) == "".join(pieces)
    assert all(token_id < TOKENS.conversation for token_id in token_ids)


@given(PIECES)
def test_the_gateway_shows_the_same_text(pieces: list[str]) -> None:
    stream = Detokenizer(TOKENS.tokenizer)
    shown = "".join(stream.push(t) for piece in pieces for t in TOKENS.encode(piece))
    assert shown + stream.flush() == "".join(pieces)


def test_half_a_surrogate_pair_is_replaced() -> None:
    assert TOKENS.decode(TOKENS.encode("a\ud83d")) == "a\ufffd"


def broken(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(FILE.read_text())
    return {**values, **changes}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (broken(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}), "every byte"),
        (broken(decoder=None), "give a text back"),
        ({}, "is not a tokenizer"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, values: dict[str, Any], problem: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(values))
    with pytest.raises(SettingsError, match=problem):
        load_text_tokens(file)
