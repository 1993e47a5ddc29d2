"""The engine of a real classification head: what transformers says of a text alone, it says in a batch."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

from model_workers.engine.protocol import (
    Sampling,
    SequenceEnd,
)
from model_workers.engine.values import load_classifier
from model_workers.model_folder import check_model
from sluice.errors import PromptTooLong
from sluice.settings import ModelSettings, SettingsError
from tests.support.sequences import sequence_spec
from tests.support.settings import tuned
from tests.support.tiny_classifier import CONTEXT, attack, questions, save_classifier

JUDGED = Sampling(max_tokens=1, logprobs=True, top_logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that has learned nothing."""
    return save_classifier(tmp_path_factory.mktemp("untrained"), steps=0)


def settings(folder: Path, **changes: Any) -> ModelSettings:
    return tuned(
        ModelSettings, name="judge", path=str(folder), engine="classifier", device="cpu", **changes
    )


def test_batched_rows_get_what_each_gets_alone(folder: Path) -> None:
    judged(folder, 10)


@pytest.mark.long
def test_attacks_are_told_apart(classifier_folder: Path) -> None:
    assert judged(classifier_folder, 40) >= 0.97


def judged(folder: Path, pairs: int) -> float:
    """The share of a question and an attack each that are told right, each as transformers says of it alone."""
    draw = random.Random("held out")
    texts = [
        (make(draw), label) for _ in range(pairs) for label, make in ((0, questions), (1, attack))
    ]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sequences = [tokenizer.encode(" ".join(words)).ids for words, _ in texts]
    engine = load_classifier(settings(folder, slots=16, max_waiting_rows=80))
    for number, sequence in enumerate(sequences):
        engine.add(sequence_spec(str(number), sequence, JUDGED), 0.0)
    steps = []
    while engine.has_sequences():
        steps += engine.step(0.0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    right = 0
    for step in steps:
        number = int(step.request_id)
        with torch.inference_mode():
            alone = torch.log_softmax(
                model(torch.tensor([sequences[number]])).logits[0], -1
            ).tolist()
        told = dict(step.logprobs[0].top)
        assert [told[0], told[1]] == pytest.approx(alone, abs=1e-4)
        assert math.exp(told[0]) + math.exp(told[1]) == pytest.approx(1)
        assert step.end is SequenceEnd.LENGTH
        right += step.token_ids == (texts[number][1],)
    return right / len(sequences)


def test_long_texts_do_not_stall_a_step(folder: Path) -> None:
    engine = load_classifier(settings(folder, prefill_tokens=10))
    for name, size in (("a", 6), ("b", 8), ("c", 3)):
        engine.add(sequence_spec(name, [2] * size, JUDGED), 0.0)
    engine.add(sequence_spec("judged before", [2], JUDGED, produced=[1]), 0.0)
    steps = [[step.request_id for step in engine.step(0.0)] for _ in range(2)]
    assert steps == [["judged before", "a"], ["b", "c"]]
    assert not engine.has_sequences()


def test_multi_label_models_have_independent_probabilities(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["problem_type"] = "multi_label_classification"
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = load_classifier(settings(tmp_path))
    engine.add(sequence_spec("r", [2, 4, 9, 3], JUDGED), 0.0)
    (step,) = engine.step(0.0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        alone = torch.sigmoid(model(torch.tensor([[2, 4, 9, 3]])).logits[0]).tolist()
    told = dict(step.logprobs[0].top)
    assert [math.exp(told[0]), math.exp(told[1])] == pytest.approx(alone, abs=1e-4)


def test_a_row_longer_than_the_context_is_refused(folder: Path) -> None:
    engine = load_classifier(settings(folder))
    with pytest.raises(PromptTooLong):
        engine.add(sequence_spec("r", [2] * CONTEXT, JUDGED), 0.0)
    with pytest.raises(SettingsError, match="context_tokens is 65, the model allows at most 64"):
        load_classifier(settings(folder, context_tokens=65))


def test_a_folder_without_labels_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["id2label"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=r".*config.json has no labels; name them"):
        check_model(settings(tmp_path))
    check_model(settings(folder))
