from pathlib import Path

import pytest
import torch

from model_workers.engine.checkpoint import load_engine
from sluice.settings import ModelSettings, SettingsError
from tests.support.rows import drive, row_spec
from tests.support.tiny_models import CONTEXT, save_model


def model(folder: Path, **changes: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": "tiny", "path": str(folder), **changes})


def test_loads_and_answers_in_float32_from_bfloat16_weights(tmp_path: Path) -> None:
    core = load_engine(model(save_model(tmp_path), device="cpu", slots=3))
    load = core.load()
    assert (load.slots, load.context_tokens, load.running) == (3, CONTEXT, 0)
    assert len(drive(core, row_spec("r", [1, 2, 3])).tokens["r"]) == 8
    assert core._forward._model.dtype is torch.float32


def test_the_sliding_window_ends_the_context(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen2", use_sliding_window=True, sliding_window=64)
    assert load_engine(model(folder, device="cpu")).load().context_tokens == 64


def test_a_context_over_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="at most 256"):
        load_engine(model(save_model(tmp_path), context_tokens=300))


def test_another_kind_of_model_is_one_clear_line(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(SettingsError, match="encoder-decoder"):
        load_engine(model(folder))
