import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from model_workers.engine import checkpoint
from model_workers.engine.checkpoint import load_engine
from model_workers.engine.forward.kv_cache import KvCache
from model_workers.engine.forward.llama import FusedModel
from model_workers.engine.protocol import Sampling
from sluice.settings import ModelSettings, SettingsError
from tests.support.sequences import drive, sequence_spec
from tests.support.tiny_models import CONTEXT, save_model


def model(folder: Path, **changes: object) -> ModelSettings:
    return ModelSettings.model_validate({"name": "tiny", "path": str(folder), **changes})


def test_a_cache_too_small_for_a_row_is_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"256 tokens.*raise cache_gb"):
        load_engine(model(save_model(tmp_path), device="cpu", cache_gb=1e-5))


def test_the_cache_is_no_larger_than_all_slots_can_fill(tmp_path: Path) -> None:
    load = load_engine(model(save_model(tmp_path), device="cpu", slots=3)).load()
    assert load.cache_blocks == 3 * CONTEXT // load.block_tokens


def test_a_draft_changes_no_answer(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    draft = save_model(tmp_path / "draft", num_hidden_layers=1)
    sequences = [
        sequence_spec(f"r{i}", [i, 2, 3], Sampling(60, temperature=i % 2)) for i in range(4)
    ]
    expected = drive(load_engine(model(folder, device="cpu")), *sequences)
    core = load_engine(model(folder, device="cpu", draft=str(draft)), time.monotonic)
    assert drive(core, *sequences) == expected


def too_much(*_: object, **__: object) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            (checkpoint, "load_model"),
            r"weights do not fit on cpu \(CUDA out of memory\): serve fewer",
        ),
        (
            (KvCache, "_zeros"),
            r"a cache of 0.* GB does not fit on cpu beside .*: lower cache_gb or",
        ),
        (
            (FusedModel, "_compute"),
            "cannot compute its first sequence: .*; lower prefill_tokens,",
        ),
    ],
)
def test_missing_memory_at_start_is_one_line_with_a_remedy(
    part: tuple[object, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*part, too_much)
    with pytest.raises(SettingsError, match=message) as error:
        load_engine(model(save_model(tmp_path), device="cpu"))
    assert "\n" not in str(error.value)
