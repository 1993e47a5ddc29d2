"""Embedding models and rerankers: what transformers says of a text alone, the engine says among others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from model_workers.engine.forward.encoder import group_by_length
from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
    SequenceSpec,
)
from model_workers.engine.values import ValuesEngine, load_values
from sluice.errors import InvalidRequest, PromptTooLong
from sluice.internal.v1 import task_pb2
from sluice.settings import ModelSettings, SettingsError
from tests.support.settings import tuned
from tests.support.tiny_encoders import (
    CONTEXT,
    SIZE,
    add_modules,
    config_of,
    ids_of,
    save_reranker,
    save_tokenizer,
    save_transformer,
    texts,
)

MEAN = {"pooling_mode_mean_tokens": True}
FAMILIES = {
    "bert": {},
    "roberta": {"max_position_embeddings": CONTEXT + 1},
    "modernbert": {
        "local_attention": 8, "global_attn_every_n_layers": 2, "reference_compile": False,
        "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3,
    },
    "nomic_bert": {"head_dim": 8},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2},
    "mpnet": {"max_position_embeddings": CONTEXT + 2},
}  # fmt: skip


def settings(folder: Path, engine: str = "embedding", **changes: Any) -> ModelSettings:
    return tuned(
        ModelSettings,
        name="m",
        path=str(folder),
        engine=engine,
        device="cpu",
        max_waiting_rows=200,
        **changes,
    )


def sequence(number: int, prompt: Sequence[int], **values: Any) -> SequenceSpec:
    return SequenceSpec(
        str(number), "b", 0, tuple(prompt), (), Sampling(5), values=task_pb2.Values(**values)
    )


def values_of(engine: ValuesEngine, sequences: Sequence[SequenceSpec]) -> list[Any]:
    for one in sequences:
        engine.add(one, 0.0)
    found = {}
    while engine.has_sequences():
        for step in engine.step(0.0):
            assert step.end is SequenceEnd.STOP, step.error
            found[step.request_id] = np.frombuffer(step.values, "<f4")
    return [found[one.request_id] for one in sequences]


@pytest.mark.parametrize("kind", FAMILIES)
def test_texts_get_the_numbers_of_each_text_alone(kind: str, tmp_path: Path) -> None:
    folder = save_transformer(tmp_path, config_of(kind, **FAMILIES[kind]))
    model: Any = AutoModel.from_pretrained(folder).eval()
    sequences = ids_of(folder, texts(40))
    alone = []
    with torch.inference_mode():
        for ids in sequences:
            alone.append(model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0).numpy())
    engine = load_values(settings(folder))
    found = values_of(engine, [sequence(place, ids) for place, ids in enumerate(sequences)])
    for ours, theirs in zip(found, alone, strict=True):
        assert np.abs(ours - theirs).max() < 1e-5


TAGGERS = {
    "bert": {},
    "roberta": {"max_position_embeddings": CONTEXT + 1},
    "distilbert": {"dim": SIZE, "n_heads": 4, "n_layers": 2, "hidden_dim": 64},
    "deberta-v2": {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["p2c"]},
}


@pytest.mark.parametrize("kind", TAGGERS)
def test_tokens_get_the_labels_of_each_text_alone(kind: str, tmp_path: Path) -> None:
    labels = {str(number): label for number, label in enumerate(("O", "B-PER", "I-PER"))}
    config = config_of(kind, id2label=labels, **TAGGERS[kind])
    torch.manual_seed(0)
    model: Any = AutoModelForTokenClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    sequences = ids_of(tmp_path, texts(30))
    engine = load_values(settings(tmp_path, engine="token_classifier"))
    found = values_of(engine, [sequence(place, ids) for place, ids in enumerate(sequences)])
    for ids, ours in zip(sequences, found, strict=True):
        with torch.inference_mode():
            chances = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
        theirs = chances.gather(1, torch.tensor(ours.reshape(-1, 2)[:, :1]).long())[:, 0]
        assert np.abs(ours.reshape(-1, 2)[:, 1] - theirs.numpy()).max() < 1e-4
        assert np.abs(theirs.numpy() - chances.max(-1).values.numpy()).max() < 1e-4


def test_a_model_without_the_head_is_refused(tmp_path: Path) -> None:
    folder = save_transformer(tmp_path, config_of("bert", id2label={"0": "O", "1": "PER"}))
    with pytest.raises(SettingsError, match="its weights lack classifier"):
        load_values(settings(folder, engine="token_classifier"))


def test_groups_hold_every_place_once_and_little_padding() -> None:
    lengths = [5, 100, 7, 93, 6, 50, 1]
    found = list(group_by_length(lengths))
    assert sorted(place for group in found for place in group) == list(range(len(lengths)))
    for group in found:
        cells = max(lengths[place] for place in group) * len(group)
        assert cells - sum(lengths[place] for place in group) <= 0.1 * cells


def test_an_embedding_is_cut_and_scaled_as_asked(tmp_path: Path) -> None:
    folder = save_transformer(tmp_path, config_of("bert"))
    add_modules(folder, {"pooling_mode_cls_token": True}, dense=12, normalize=True)
    engine = load_values(settings(folder))
    (ids,) = ids_of(folder, texts(1))
    asked = ({}, {"dimensions": 4}, {"dimensions": 4, "normalize": False})
    whole, cut, raw = values_of(engine, [sequence(at, ids, **one) for at, one in enumerate(asked)])
    assert [len(whole), len(cut), len(raw)] == [12, 4, 4]
    assert np.linalg.norm(whole) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(cut) == pytest.approx(1, abs=1e-6)
    assert raw == pytest.approx(whole[:4], abs=1e-6)
    assert cut == pytest.approx(whole[:4] / np.linalg.norm(whole[:4]), abs=1e-6)


def test_pairs_get_the_scores_of_each_pair_alone(tmp_path: Path) -> None:
    folder = save_reranker(tmp_path)
    query, *documents = ids_of(folder, texts(20, most=25))
    pairs = [(query + document[1:], len(query)) for document in documents]
    sequences = [sequence(at, ids, second_text=second) for at, (ids, second) in enumerate(pairs)]
    found = values_of(load_values(settings(folder, "reranker")), sequences)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for (ids, second), ours in zip(pairs, found, strict=True):
        types = [0] * second + [1] * (len(ids) - second)
        with torch.inference_mode():
            theirs = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        assert ours[0] == pytest.approx(float(torch.sigmoid(theirs)), abs=1e-5)


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    folder = save_transformer(tmp_path / "plain", config_of("bert"))
    engine = load_values(settings(folder))
    engine.add(sequence(0, [5] * CONTEXT), 0.0)
    with pytest.raises(PromptTooLong):
        engine.add(sequence(1, [5] * (CONTEXT + 1)), 0.0)
    with pytest.raises(InvalidRequest, match="not one of the model's 105"):
        engine.add(sequence(1, [105]), 0.0)
    with pytest.raises(InvalidRequest, match="gives no tokens"):
        engine.add(SequenceSpec("r", "b", 0, (5,), (), Sampling(5)), 0.0)
    with pytest.raises(InvalidRequest, match="gives no tokens"):
        engine.add(sequence(1, [5], scored_token_ids=(5,)), 0.0)
    with pytest.raises(SettingsError, match="a reranker has one label, this model 2"):
        load_values(settings(folder, "reranker"))


def test_a_folder_with_a_part_that_is_not_served_is_refused(tmp_path: Path) -> None:
    folder = save_transformer(tmp_path, config_of("bert"))
    add_modules(folder, {**MEAN, "include_prompt": False})
    with pytest.raises(SettingsError, match="include_prompt: false is not served"):
        load_values(settings(folder))
    add_modules(folder, {"pooling_mode": "attention"})
    with pytest.raises(SettingsError, match=r"pooling \['attention'\] is not served"):
        load_values(settings(folder))
    modules = (folder / "modules.json").read_text().replace("models.Pooling", "models.LSTM")
    (folder / "modules.json").write_text(modules)
    with pytest.raises(SettingsError, match="LSTM: only Pooling, Dense and Normalize are served"):
        load_values(settings(folder))
