"""A model of several modalities is refused in one line, by the gateway and by the worker."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from gateway.config.models import ModelFolder
from model_workers.engine.forward import load_model
from model_workers.model_folder import check_model
from sluice.settings import ModelSettings, SettingsError
from sluice.settings.models import check_modality
from tests.support.tiny_models import config, save_model

SAID = {
    "gemma3": {"architectures": ["Gemma3ForConditionalGeneration"]},
    "llava": {"architectures": ["LlavaForConditionalGeneration"]},
    "qwen2_vl": {"architectures": ["Qwen2VLForConditionalGeneration"]},
}


def settings(folder: Path, **fields: Any) -> ModelSettings:
    return ModelSettings.model_validate({"name": "m", "path": str(folder), **fields})


@pytest.mark.parametrize("kind", SAID)
def test_it_is_one_line_that_says_what_to_do(kind: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    said = {**AutoConfig.for_model(kind).to_dict(), **SAID[kind]}
    (folder / "config.json").write_text(json.dumps(said))

    def tokenizer_of(model: ModelSettings) -> object:
        return ModelFolder(model).tokenizer

    for refuse in (check_model, tokenizer_of, lambda model: load_model(model.path)):
        with pytest.raises(SettingsError) as error:
            refuse(settings(folder))
        line = str(error.value)
        assert f"is a {said['architectures'][0]}, a model of several modalities" in line
        assert "serve it with vLLM behind `engine: openai`" in line
        assert "\n" not in line


def test_served_by_somebody_else_its_tokenizer_is_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    said = AutoConfig.for_model("gemma3", text_config={"vocab_size": 97}).to_dict()
    (folder / "config.json").write_text(json.dumps(said))
    server = {"url": "http://127.0.0.1:1", "api": "tokens", "model": "m"}
    model = settings(folder, engine="openai", server=server)
    check_model(model)
    assert ModelFolder(model).tokenizer.vocab_size == 97


def test_every_kind_that_transformers_knows_is_refused() -> None:
    served = []
    for kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        said = AutoConfig.for_model(kind).to_dict()
        try:
            check_modality(kind, said)
        except SettingsError:
            continue
        if not said.get("is_encoder_decoder"):  # those are served by name
            served.append(kind)
    assert served in ([], ["mistral4"])  # a text model


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "gpt2"]
)
def test_text_models_are_not(family: str) -> None:
    check_modality(family, config(family).to_dict())
