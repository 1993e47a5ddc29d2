"""A checkpoint without one of its tensors is refused by name, whatever the tensor and the engine."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_workers.engine.checkpoint import load_engine
from model_workers.engine.families import load_encoder_decoder
from model_workers.engine.values import load_classifier, load_values
from model_workers.model_folder import WEIGHTS
from sluice.settings import ModelSettings, SettingsError
from tests.support.tiny_classifier import save_classifier
from tests.support.tiny_encoders import add_modules, config_of, save_reranker, save_transformer
from tests.support.tiny_models import save_model
from tests.support.tiny_seq2seq import save_seq2seq
from tests.support.tiny_tagger import save_tagger
from tests.support.tiny_whisper import save_whisper

MODELS: dict[str, tuple[str, Callable[[ModelSettings], Any], Callable[[Path], Path]]] = {
    **{
        kind: ("transformers", load_engine, lambda folder, kind=kind: save_model(folder, kind))
        for kind in ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "gpt2")
    },
    "llama-tied": (
        "transformers", load_engine, lambda folder: save_model(folder, tie_word_embeddings=True),
    ),
    **{
        kind: (
            "transformers", load_encoder_decoder, lambda folder, kind=kind: save_seq2seq(folder, kind),
        )
        for kind in ("t5", "mt5", "umt5", "bart", "marian", "pegasus")
    },
    "whisper": ("transformers", load_encoder_decoder, save_whisper),
    **{
        kind: (
            "embedding", load_values, lambda folder, kind=kind: save_transformer(folder, config_of(kind)),
        )
        for kind in ("bert", "roberta", "mpnet", "modernbert")
    },
    "reranker": ("reranker", load_values, save_reranker),
    "tagger": ("token_classifier", load_values, save_tagger),
    "classifier": ("classifier", load_classifier, lambda folder: save_classifier(folder, steps=0)),
}  # fmt: skip


ALIKE = {"qwen2", "mistral", "gemma", "mt5", "umt5", "marian", "pegasus", "roberta", "mpnet"}
"""Models whose tensors have the names of those of another one here."""
OPTIONAL = {"embedding": "pooler.", "transformers": "final_logits_bias"}
"""Nothing is computed with the first; without the second it is 0."""


def settings(folder: Path, engine: str) -> ModelSettings:
    fields = {"name": "m", "path": str(folder), "engine": engine, "device": "cpu"}
    return ModelSettings.model_validate({**fields, "context_tokens": 32})


def of_each_kind(names: Iterator[str]) -> list[str]:
    """One of the tensors that differ in the number of their layer alone: that of the last one."""
    return list({re.sub(r"\.\d+\.", ".N.", name): name for name in sorted(names)}.values())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in ALIKE else ()) for name in MODELS],
)
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    """Three at a time: a message names no more."""
    engine, load, save = MODELS[name]
    (tmp_path / "m").mkdir()
    folder = save(tmp_path / "m")
    whole = load_file(folder / WEIGHTS)
    load(settings(folder, engine))
    unused = {key for key in whole if key.startswith(OPTIONAL.get(engine, "-"))}
    needed = of_each_kind(key for key in whole if key not in unused)
    for place in range(0, len(needed), 3):
        lost = needed[place : place + 3]
        kept = {key: value for key, value in whole.items() if key not in unused.union(lost)}
        save_file(kept, folder / WEIGHTS, {"format": "pt"})
        with pytest.raises(SettingsError, match=r"its weights lack ") as error:
            load(settings(folder, engine))
        assert [key for key in lost if key not in str(error.value)] == []
        assert "\n" not in str(error.value)
    if unused:
        kept = {key: value for key, value in whole.items() if key not in unused}
        save_file(kept, folder / WEIGHTS, {"format": "pt"})
        load(settings(folder, engine))


@pytest.mark.parametrize(
    "name", ["llama", "gemma", "t5", "whisper", "bert", "reranker", "classifier"]
)
def test_a_tensor_of_another_shape_is_named(name: str, tmp_path: Path) -> None:
    engine, load, save = MODELS[name]
    (tmp_path / "m").mkdir()
    folder = save(tmp_path / "m")
    whole = load_file(folder / WEIGHTS)
    odd = next(key for key in sorted(whole) if key.endswith("weight") and whole[key].dim() == 2)
    whole[odd] = torch.zeros(whole[odd].shape[0] + 8, whole[odd].shape[1])
    save_file(whole, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(SettingsError, match="has another shape than config") as error:
        load(settings(folder, engine))
    assert odd.removeprefix("model.") in str(error.value)


def test_a_dense_module_without_a_tensor_is_one_line(tmp_path: Path) -> None:
    folder = save_transformer(tmp_path, config_of("bert"))
    add_modules(folder, {"pooling_mode": "mean"}, dense=4)
    load_values(settings(folder, "embedding"))
    path = folder / "2_Dense" / WEIGHTS
    whole = load_file(path)
    for broken in ({"linear.bias": whole["linear.bias"]}, {**whole, "linear.bias": torch.zeros(5)}):
        save_file(broken, path)
        with pytest.raises(SettingsError, match=r"2_Dense.*linear.*copy it again") as error:
            load_values(settings(folder, "embedding"))
        assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(SettingsError, match="2_Dense"):
        load_values(settings(folder, "embedding"))
    path.write_bytes(b"rubbish")
    with pytest.raises(SettingsError, match="2_Dense"):
        load_values(settings(folder, "embedding"))


def test_tensors_that_no_layer_has_are_left_out(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    whole = load_file(folder / WEIGHTS)
    whole["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(whole, folder / WEIGHTS, {"format": "pt"})
    load_engine(settings(folder, "transformers"))
