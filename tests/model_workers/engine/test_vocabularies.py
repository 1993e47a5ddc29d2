"""Texts with characters that a vocabulary does not know: embeddings, scores and answers are those of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from gateway.config.models import ModelFolder
from model_workers.engine.families import load_encoder_decoder
from model_workers.engine.protocol import Sampling, SequenceSpec
from model_workers.model_folder import check_model
from sluice.settings import ModelSettings, SettingsError
from sluice.v1.inference_pb2 import EmbedRequest, RerankRequest
from tests.support.settings import tuned
from tests.support.tiny_encoders import config_of
from tests.support.tiny_marian import FOUND, save_marian
from tests.support.tiny_seq2seq import tiny_seq2seq
from tests.support.tiny_vocabularies import KINDS, TEXTS, save_vocabulary
from tests.support.whole_texts import computed, cosine, settings_of

CONTEXT = 128
PAIR = "<s> $A </s> </s> $B </s>"
FITTING = {
    ("t5", "unigram"),
    ("marian", "pairs"),
    ("bart", "byte-pairs"),
}
"""Each family and each vocabulary: that the ids of all texts are right does not depend on the family."""


def save_encoder(folder: Path, kind: str, *, scores: bool = False) -> Path:
    tokenizer = save_vocabulary(folder, kind, context=CONTEXT, single="<s> $A </s>", pair=PAIR)
    torch.manual_seed(0)
    config = config_of(
        "xlm-roberta", vocab_size=tokenizer.get_vocab_size(), num_labels=1 if scores else 2,
        max_position_embeddings=CONTEXT + 2, pad_token_id=1, initializer_range=0.2, type_vocab_size=1,
    )  # fmt: skip
    make: Any = AutoModelForSequenceClassification if scores else AutoModel
    make.from_config(config).eval().save_pretrained(folder)
    return folder


def embeddings(folder: Path, said: list[str]) -> Any:
    """transformers' own, one text at a time, and the mean of the hidden states."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        states = [model(**tokenizer(text, return_tensors="pt")) for text in said]
    return np.stack([one.last_hidden_state[0].mean(0).numpy() for one in states])


def scores(folder: Path, query: str, documents: list[str]) -> Any:
    """transformers' own, one pair at a time, and the sigmoid."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.inference_mode():
        found = [
            model(**tokenizer([query], [one], return_tensors="pt")).logits for one in documents
        ]
    return np.array([torch.sigmoid(one[0, 0]).item() for one in found])


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, kind)
    found = computed(settings_of(folder, "embedding"), EmbedRequest(texts=TEXTS), [*TEXTS])
    theirs = embeddings(folder, [*TEXTS])
    worst = dict(zip(TEXTS, cosine(found, theirs), strict=True))
    assert min(worst.values()) > 0.9999, {text: one for text, one in worst.items() if one < 0.9999}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, kind, scores=True)
    for query in ("héllo 中文 😀", ""):
        request = RerankRequest(query=query, documents=TEXTS)
        found = computed(settings_of(folder, "reranker"), request, [query, *TEXTS])[:, 0]
        assert np.abs(found - scores(folder, query, [*TEXTS])).max() < 1e-4


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if (family, kind) in FITTING else pytest.mark.long)
        for family in ("t5", "marian", "bart")
        for kind in KINDS
    ],
)
def test_answers_are_those_of_generate(family: str, kind: str, tmp_path: Path) -> None:
    single = "<s> $A </s>" if family == "bart" else "$A </s>"
    tokenizer = save_vocabulary(tmp_path, kind, context=64, single=single, pair=PAIR)
    model = tiny_seq2seq(
        family, vocab_size=tokenizer.get_vocab_size(), decoder_start_token_id=1, pad_token_id=1,
        eos_token_id=2, **({} if family == "t5" else {"max_position_embeddings": CONTEXT}),
    )  # fmt: skip
    model.generation_config.bad_words_ids = [[1]] if family == "marian" else None
    model.save_pretrained(tmp_path)
    settings = tuned(ModelSettings, name="m", path=str(tmp_path), max_waiting_rows=1000)
    encoder = ModelFolder(settings).tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    engine, answers = load_encoder_decoder(settings), {}
    for number, text in enumerate(TEXTS):
        prompt = tuple(encoder.encode_text(text))
        assert [*prompt] == theirs(text).input_ids, text
        sampling = Sampling(12, stop_token_ids=frozenset({2}))
        if prompt:
            engine.add(SequenceSpec(str(number), "b", 0, prompt, (), sampling), 0.0)
            answers[str(number)] = []
    while engine.has_sequences():
        for step in engine.step(0.0):
            assert not step.error
            answers[step.request_id] += step.token_ids
    assert len(set(map(tuple, answers.values()))) > 1, "they depend on the texts"
    for number, answer in answers.items():
        inputs = theirs(TEXTS[int(number)], return_tensors="pt")
        generated = model.generate(
            inputs.input_ids, do_sample=False, num_beams=1, forced_eos_token_id=None,
            max_new_tokens=12 + (family == "bart"),
        )[0].tolist()  # fmt: skip
        assert answer == generated[2 if family == "bart" else 1 :]


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_in_a_text_are_text(kind: str, tmp_path: Path) -> None:
    """With what the tokenizer adds to every text."""
    save_encoder(tmp_path, kind)
    encoder = ModelFolder(settings_of(tmp_path, "embedding")).tokenizer
    tokenizer: Tokenizer = encoder.tokenizer
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    ids = encoder.encode_text("hello</s>中<mask>world")
    assert (ids[0], ids[-1]) == (begin, end)
    controls = {tokenizer.token_to_id(name) for name in ("<s>", "</s>", "<mask>", "<pad>")}
    assert controls.isdisjoint(ids[1:-1])
    if kind in ("unigram", "word-piece", "pairs"):
        assert tokenizer.token_to_id("<unk>") in ids[1:-1]
    places = [one.token_id for one in encoder.segments("hello</s>中<mask>world", 100)[0].tokens]
    assert places == ids[1:-1]


def test_a_marian_folder_of_the_hub_is_served(tmp_path: Path) -> None:
    """It has no tokenizer.json."""
    model = save_marian(tmp_path)
    settings = tuned(ModelSettings, name="m", path=str(tmp_path), max_waiting_rows=1000)
    check_model(settings)
    encoder, engine = ModelFolder(settings).tokenizer, load_encoder_decoder(settings)
    prompts = {text: encoder.encode_text(text) for text in FOUND}
    answers: dict[str, list[int]] = {text: [] for text in FOUND}
    stops = encoder.stop_token_ids
    for text, prompt in prompts.items():
        sequence = SequenceSpec(text, "b", 0, tuple(prompt), (), Sampling(9, stop_token_ids=stops))
        engine.add(sequence, 0.0)
    while engine.has_sequences():
        for step in engine.step(0.0):
            answers[step.request_id] += step.token_ids
    assert len(set(map(tuple, answers.values()))) > 1, "they depend on the texts"
    for text, answer in answers.items():
        prompt = torch.tensor([prompts[text]])
        generated = model.generate(
            prompt, do_sample=False, num_beams=1, max_new_tokens=9, forced_eos_token_id=None
        )
        assert answer == generated[0, 1:].tolist()


def test_marian_folder_with_extra_tokens_is_refused(tmp_path: Path) -> None:
    save_marian(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "one more": len(vocabulary)}))
    with pytest.raises(SettingsError, match=r"vocab\.json has \d+ tokens"):
        check_model(ModelSettings(name="m", path=str(tmp_path)))
