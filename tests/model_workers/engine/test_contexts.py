"""The context that a gateway names is the one that the worker computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Phi3Config, Phi3ForCausalLM

from gateway.config.models import ModelFolder
from model_workers.engine.forward.load import load_model
from model_workers.engine.protocol import Sampling, SequenceSpec
from model_workers.engine.values import load_classifier, load_values
from sluice.internal.v1 import task_pb2
from sluice.settings import ModelSettings
from tests.support.tiny_encoders import config_of, save_tokenizer, save_transformer
from tests.support.tiny_models import CONTEXT, save_model

SHORT = 64
_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **_FACTORS}
OLD: dict[str, dict[str, Any]] = {
    "in rope_scaling": {
        "rope_scaling": {"type": "longrope", "original_max_position_embeddings": SHORT, **_FACTORS}
    },
    "beside it": {
        "rope_scaling": {"type": "longrope", **_FACTORS}, "original_max_position_embeddings": SHORT,
    },
    "su": {"rope_scaling": {"type": "su", "original_max_position_embeddings": SHORT, **_FACTORS}},
}  # fmt: skip
"""How configurations of Phi-3 say it on the hub."""


def of_gateway(folder: Path, engine: str = "transformers") -> int:
    return ModelFolder(
        ModelSettings.model_validate({"name": "m", "path": str(folder), "engine": engine})
    ).tokenizer.context_tokens


def save_phi3(folder: Path) -> Path:
    save_model(folder)  # for its tokenizer
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        original_max_position_embeddings=SHORT, rope_parameters=LONGROPE, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", ["as transformers writes it", *OLD])
def test_frequencies_for_long_rows_end_the_context_in_both(way: str, tmp_path: Path) -> None:
    folder = save_phi3(tmp_path)
    if way in OLD:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        for key in ("rope_parameters", "original_max_position_embeddings"):
            config.pop(key, None)
        path.write_text(json.dumps({**config, "rope_theta": 1e4, **OLD[way]}))
    assert of_gateway(folder) == load_model(str(folder)).context_tokens == SHORT


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, CONTEXT),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, CONTEXT),
        (
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": SHORT},
            CONTEXT,
        ),
        (
            {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": SHORT},
            SHORT,
        ),
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, CONTEXT),
        ({**LONGROPE, "original_max_position_embeddings": SHORT}, SHORT),
        ({**LONGROPE, "factor": 4.0}, CONTEXT),
    ],
)  # fmt: skip
def test_every_kind_of_rotary_embedding(rope: dict[str, Any], context: int, tmp_path: Path) -> None:
    folder = save_model(tmp_path, rope_parameters=rope)
    assert of_gateway(folder) == load_model(str(folder)).context_tokens == context


def test_a_server_of_somebody_else_has_the_whole_context(tmp_path: Path) -> None:
    """What it computes is not for our cache to limit."""
    folder = save_phi3(tmp_path)
    server = {"url": "http://127.0.0.1:1", "api": "tokens", "model": "m"}
    fields = {"name": "m", "path": str(folder), "engine": "openai", "server": server}
    assert ModelFolder(ModelSettings.model_validate(fields)).tokenizer.context_tokens == CONTEXT


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("engine", ["classifier", "embedding"])
def test_a_text_as_long_as_the_context_is_computed(engine: str, kind: str, tmp_path: Path) -> None:
    """Of RoBERTa two positions belong to padding."""
    config = config_of(
        kind,
        pad_token_id=1 if kind == "roberta" else 0,
        max_position_embeddings=SHORT,
        num_labels=2,
        id2label={0: "A", 1: "B"},
    )
    settings = ModelSettings.model_validate({"name": "m", "path": str(tmp_path), "engine": engine})
    if engine == "embedding":
        save_transformer(tmp_path, config)
        loaded: Any = load_values(settings)
    else:
        make: Any = AutoModelForSequenceClassification.from_config(config)
        make.save_pretrained(tmp_path)
        save_tokenizer(tmp_path)
        loaded = load_classifier(settings)
    context = of_gateway(tmp_path, engine)
    assert context == SHORT - (2 if kind == "roberta" else 0)
    tokens = context if engine == "embedding" else context - 1  # its label counts as a token
    values = task_pb2.Values() if engine == "embedding" else None
    loaded.add(SequenceSpec("r", "b", 0, (5,) * tokens, (), Sampling(1), values=values), 0.0)
    steps = [step for _ in range(9) for step in loaded.step(0.0)]
    assert [step.error for step in steps] == [""]
