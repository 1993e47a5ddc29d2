"""The tokenizer loses nothing, splits digits and knows the chat form."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.tiers.tokenizer import SPECIALS, VOCAB_SIZE, save_tokenizer, train_tokenizer

MODELS = Path(__file__).parents[3] / "model_workers" / "models"
TOKENIZER: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(MODELS / "small")


def _holds_no_special(text: str) -> bool:
    return not any(special in text for special in SPECIALS)


@given(st.text().filter(_holds_no_special))
def test_any_text_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a  b\n\n\tc ",
        "订单 A-10482 已付 59.90",
        "👩‍👩‍👧 🇩🇪 ☕️",
        "e\u0301 é ½ ٣",
        "\x00\x7f\ufffd",
        "<|en d|>",
    ],
)
def test_chosen_texts_come_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(min_size=1).filter(_holds_no_special), st.data())
def test_a_cut_inside_a_character_never_raises(text: str, data: st.DataObject) -> None:
    ids = TOKENIZER.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    # Half a character decodes to the replacement sign; the two id lists together are the text.
    TOKENIZER.decode(ids[:cut])
    assert TOKENIZER.decode(ids[:cut] + ids[cut:]) == text


def test_every_digit_is_its_own_token() -> None:
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("Add 1234, 56.78"))
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("12345678")


def test_special_tokens_have_fixed_ids() -> None:
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIALS)) == [0, 1, 2, 3, 4, 5]
    assert len(TOKENIZER) == VOCAB_SIZE
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (0, 1, 5)


def test_chat_template_with_and_without_a_system_turn() -> None:
    user = {"role": "user", "content": "Hi"}
    said = {"role": "assistant", "content": "Yes"}
    system = {"role": "system", "content": "Be kind."}

    def text(*turns: dict[str, str], prompt: bool) -> str:
        return str(
            TOKENIZER.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=prompt)
        )

    assert text(user, prompt=True) == "<|bos|><|user|>Hi<|end|><|assistant|>"
    assert text(system, user, said, prompt=False) == (
        "<|bos|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>Yes<|end|>"
    )


def test_training_the_tokenizer_again_gives_the_shipped_one(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(), tmp_path)
    for tier in ("small", "large"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / name).read_text() == (MODELS / tier / name).read_text()
