"""Marian's tokenizer as the hub has it: the numbers are those of transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from gateway.config.models import ModelFolder
from gateway.models.tokenizer import ModelTokenizer
from sluice.settings import ModelSettings, SettingsError
from tests.support.tiny_marian import FOUND, PIECES, VOCABULARY, save_marian_files
from tests.support.tiny_vocabularies import CORPUS, TEXTS

CONFIG = {"model_type": "marian", "is_encoder_decoder": True, "max_position_embeddings": 64}
END, UNKNOWN = VOCABULARY["</s>"], VOCABULARY["<unk>"]


def load(folder: Path) -> ModelTokenizer:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": END}))
    return ModelFolder(ModelSettings(name="m", path=str(folder))).tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> ModelTokenizer:
    return load(save_marian_files(tmp_path))


@pytest.mark.parametrize("text", FOUND)
def test_prompts_are_encoded_as_transformers_does(text: str, tokenizer: ModelTokenizer) -> None:
    assert tokenizer.encode_text(text) == [*(VOCABULARY[one] for one in FOUND[text]), END]


def test_a_control_token_in_a_text_is_text(tokenizer: ModelTokenizer) -> None:
    found = tokenizer.encode_text("hello</s>world<pad>")
    assert {END, VOCABULARY["<pad>"]}.isdisjoint(found[:-1])
    assert found[-1] == END
    assert VOCABULARY["▁hello"] in found


def test_a_piece_that_is_a_control_token_is_unknown_in_a_text(tmp_path: Path) -> None:
    tokenizer = load(save_marian_files(tmp_path, pad_token="中文"))
    assert tokenizer.encode_text("中文") == [VOCABULARY["▁"], UNKNOWN, END]


def test_answers_are_pieces_of_both_languages(tokenizer: ModelTokenizer) -> None:
    said = ("▁die", "▁katze", "▁", "中文", "▁hello", "s", "<unk>", "</s>")
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.push(VOCABULARY[piece]) for piece in said) + detokenizer.flush()
    assert text == "die katze 中文 hellos"
    assert tokenizer.stop_token_ids == {END}
    assert tokenizer.vocab_size == len(PIECES)


def test_places_of_tokens_are_those_of_the_text(tokenizer: ModelTokenizer) -> None:
    text = "the cat sat on the mat"
    assert tokenizer.token_ends(text) == [3, 7, 11, 14, 18, 22]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("source.spm", b"rubbish", "not a SentencePiece model"),
        ("source.spm", b"", "not a SentencePiece model"),
        ("vocab.json", b'{"a": 0}', "vocab.json lacks </s>, <unk>, <pad>"),
        ("vocab.json", b"[]", "JSON object"),
        ("tokenizer_config.json", b'{"separate_vocabs": true}', "separate_vocabs"),
    ],
)
def test_what_is_not_served_is_one_line(
    file: str, content: bytes, says: str, tmp_path: Path
) -> None:
    (save_marian_files(tmp_path) / file).write_bytes(content)
    with pytest.raises(SettingsError, match=says) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["source.spm", "vocab.json"])
def test_a_missing_file_names_the_remedy(file: str, tmp_path: Path) -> None:
    (save_marian_files(tmp_path) / file).unlink()
    with pytest.raises(SettingsError, match=r"no tokenizer\.json; have transformers write one"):
        load(tmp_path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")  # which it does not use
@pytest.mark.parametrize("rules", ["nmt_nfkc", "identity", "nfkc_cf"])
def test_texts_of_any_kind_are_encoded_as_transformers_does(rules: str, tmp_path: Path) -> None:
    from transformers import MarianTokenizer

    save_marian_files(tmp_path)
    said = tmp_path / "said.txt"
    said.write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(said), model_prefix=str(tmp_path / "source"), vocab_size=100,
        hard_vocab_limit=False, normalization_rule_name=rules, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "source.model").replace(tmp_path / "source.spm")
    found = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    known = [found.id_to_piece(number) for number in range(3, found.get_piece_size())]
    draw = random.Random(3)
    # Some pieces have no number, and there are pieces that the prompt's language has not.
    pieces = ["</s>", "<unk>", ">>deu<<", *draw.sample(known, len(known) - 4), "中", "中文", "ß"]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "<pad>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    ours = load(tmp_path)
    theirs: Any = MarianTokenizer.from_pretrained(tmp_path)
    letters = [*"".join((*TEXTS, *CORPUS)), *" ▁<>" * 9]
    drawn = ["".join(draw.choices(letters, k=draw.randrange(40))) for _ in range(2000)]
    for text in (*TEXTS, *FOUND, *drawn, *(f">>deu<<{text}" for text in drawn[:100])):
        assert ours.encode_text(text) == theirs(text).input_ids, text
