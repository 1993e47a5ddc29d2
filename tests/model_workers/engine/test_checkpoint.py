from pathlib import Path

import pytest

from model_workers.engine.checkpoint import load_engine
from sluice.settings import ModelSettings, SettingsError
from tests.support.rows import drive, row_spec
from tests.support.tiny_models import CONTEXT, save_model


def model(folder: Path, **changes: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": "tiny", "path": str(folder), **changes})


def test_loads_and_answers(tmp_path: Path) -> None:
    core = load_engine(model(save_model(tmp_path), device="cpu", slots=3))
    load = core.load()
    assert (load.slots, load.context_tokens, load.running) == (3, CONTEXT, 0)
    assert len(drive(core, row_spec("r", [1, 2, 3])).tokens["r"]) == 8


def test_a_cache_too_small_for_a_row_is_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"models: tiny: .*256 tokens.*raise cache_gb"):
        load_engine(model(save_model(tmp_path), device="cpu", cache_gb=1e-5))


def test_the_cache_is_no_larger_than_all_slots_can_fill(tmp_path: Path) -> None:
    load = load_engine(model(save_model(tmp_path), device="cpu", slots=3, block_tokens=8)).load()
    assert (load.block_tokens, load.cache_blocks) == (8, 3 * CONTEXT // 8)


def test_a_context_over_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="at most 256"):
        load_engine(model(save_model(tmp_path), context_tokens=300))


def test_another_kind_of_model_is_one_clear_line(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(SettingsError, match="encoder-decoder"):
        load_engine(model(folder))
