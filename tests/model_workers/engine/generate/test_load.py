"""What `engine: generate` takes, and what it says of what it does not."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import DistilBertConfig, Speech2TextConfig

from gateway.config.models import ModelFolder
from model_workers.engine.generate.load import load_generate
from model_workers.engine.protocol import Sampling, SequenceSpec
from model_workers.model_folder import check_model
from sluice.settings import ModelSettings, SettingsError
from tests.support.generating_models import FAMILIES, save
from tests.support.tiny_models import CONTEXT
from tests.support.tiny_whisper import save_whisper


def settings(folder: Path, **fields: Any) -> ModelSettings:
    return ModelSettings.model_validate(
        {"name": "m", "path": str(folder), "engine": "generate", "device": "cpu", **fields}
    )


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_families_load_and_answer(family: str, tmp_path: Path) -> None:
    context = {"context_tokens": CONTEXT} if family in ("mamba", "rwkv") else {}
    model = settings(save(tmp_path, family), **context)
    check_model(model)
    engine = load_generate(model)
    tokenizer = ModelFolder(model).tokenizer
    assert engine.load().context_tokens == tokenizer.context_tokens
    assert tokenizer.stop_token_ids
    engine.add(SequenceSpec("1", "b", 0, (5, 6, 7), (), Sampling(2)), 0.0)
    assert engine.step(0.0)[0].token_ids


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama", "padded batches"),
        ("bart", "batches of equal length"),
        ("rwkv", "one request at a time"),
    ],
)
def test_log_says_how_rows_are_batched(
    family: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load_generate(settings(save(tmp_path, family), context_tokens=CONTEXT))
    assert f"in torch.float32 on cpu, context of {CONTEXT} tokens, {words}" in caplog.text


def test_bfloat16_is_taken_where_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load_generate(settings(save(tmp_path, "llama"), dtype="bfloat16"))
    assert "in torch.bfloat16 on cpu, context of 256 tokens, padded batches" in caplog.text


def test_model_without_generate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DistilBertConfig().to_dict()))
    with pytest.raises(SettingsError, match=r"distilbert has no generate\(\)"):
        load_generate(settings(tmp_path))


@pytest.mark.parametrize("refuse", [check_model, lambda model: ModelFolder(model).tokenizer])
def test_speech_is_refused_by_worker_and_gateway(tmp_path: Path, refuse: Any) -> None:
    save_whisper(tmp_path)
    with pytest.raises(SettingsError, match="is a model of speech"):
        refuse(settings(tmp_path))


def test_model_that_reads_no_text_is_refused(tmp_path: Path) -> None:
    named = {"architectures": ["Speech2TextForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(Speech2TextConfig().to_dict() | named))
    with pytest.raises(SettingsError, match=r"takes input_features, and .* texts alone"):
        load_generate(settings(tmp_path))


def test_cache_that_does_not_fit_is_refused_before_loading(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with pytest.raises(
        SettingsError, match=r"slots: 32 sequences of 256 tokens need a cache of .* GB"
    ):
        load_generate(settings(tmp_path, cache_gb=0.001))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("draft", "builtin:small"),
        ("tensor_parallel", 2),
        ("quantization", "int8"),
        ("prefix_cache", False),
    ],
)
def test_settings_of_the_paged_engine_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f'{key}: belongs to the engine "transformers"'):
        settings(Path("builtin:small"), **{key: value})
