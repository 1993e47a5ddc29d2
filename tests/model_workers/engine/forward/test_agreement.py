"""A model that the paged engine would compute wrongly is refused at load, with what to do."""

import logging
from pathlib import Path
from typing import Any

import pytest

from model_workers.engine.forward import load_model
from model_workers.engine.paged_model import SequenceChunk
from sluice.settings import SettingsError
from tests.support.generating_models import save
from tests.support.tiny_models import save_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["diffllama", "bart"])
def test_models_computed_wrongly_are_refused(family: str, dtype: str, tmp_path: Path) -> None:
    folder = str(save(tmp_path, family))
    with pytest.raises(SettingsError, match="otherwise than transformers") as error:
        load_model(folder, device="cpu", dtype=dtype)
    assert "set `engine: generate`" in str(error.value)
    assert "\n" not in str(error.value)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "gpt2")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_computed_rightly_are_served(family: str, dtype: str, tmp_path: Path) -> None:
    # Another activation than the fused path knows: transformers' own layers compute it.
    changes = {"hidden_act": "gelu"} if family in ("llama", "qwen2", "qwen3", "mistral") else {}
    loaded = load_model(str(save_model(tmp_path, family, **changes)), device="cpu", dtype=dtype)
    logits = loaded.paged(4, 32).forward([SequenceChunk(range(9), 0, (0,), 1)])
    assert logits.isfinite().all()


@pytest.mark.parametrize("option", [{"quantization": "int8"}, {"quantization": "fp8"}])
def test_log_says_what_was_not_compared(
    option: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load_model(str(save_model(tmp_path, "gemma")), device="cpu", **option)
    assert f"did not compare the first tokens of {tmp_path} with transformers: quant" in caplog.text
