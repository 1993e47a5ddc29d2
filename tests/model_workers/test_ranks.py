"""Two ranks on the CPU, with gloo: one process beside that of the tests."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from torch import distributed

from model_workers.engine import checkpoint
from model_workers.engine.checkpoint import load_engine, load_model_of
from model_workers.engine.protocol import Sampling
from model_workers.ranks import RankProcesses, rank_devices
from sluice.settings import ModelSettings, SettingsError
from tests.support.sequences import drive, sequence_spec
from tests.support.tiny_models import save_model

WAIT_S = 60.0
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def model(folder: Path | str, **changes: object) -> ModelSettings:
    values = {"name": "tiny", "path": str(folder), "device": "cpu", "slots": 3, **changes}
    return ModelSettings.model_validate(values)


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    yield
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


def test_two_ranks_answer_as_one_and_one_that_ends_is_noticed(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    # More sequences than slots, prompts in chunks, a shared prefix, and a copy of its last block.
    sequences = [sequence_spec(f"r{i}", [*range(3, 67), *range(i)], Sampling(12)) for i in range(5)]
    settings = {"prefill_tokens": 40, "context_tokens": 96}
    expected = drive(load_engine(model(folder, **settings)), *sequences)
    sharded = model(folder, **settings, tensor_parallel=2)
    lost = Event()
    with closing(RankProcesses(sharded, on_lost=lost.set)) as ranks:
        engine = load_engine(sharded, followers=ranks)
        assert engine._runner.model._model._attention.cache.shapes[0].kv_heads == 1  # type: ignore[attr-defined]
        assert drive(engine, *sequences) == expected
        assert not lost.is_set()
        os.kill(ranks._processes[0].pid, signal.SIGKILL)
        assert lost.wait(WAIT_S)
    assert not distributed.is_initialized()


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [str(d) for d in rank_devices(model("none", device="auto", tensor_parallel=2))] == [
        "cuda:0",
        "cuda:1",
    ]
    with pytest.raises(SettingsError, match=r"tensor_parallel: 4 ranks need 4 .* sees 2"):
        rank_devices(model("none", device="auto", tensor_parallel=4))
    with pytest.raises(SettingsError, match="cuda:5 is not there"):
        rank_devices(model("none", device="auto", tensor_parallel=2, devices=[0, 5]))


@pytest.mark.parametrize(("rank", "device"), [(0, "cuda:2"), (1, "cuda:3")])
def test_each_rank_loads_onto_its_own_device(
    rank: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(checkpoint, "check_weights_fit", lambda *_: None)
    monkeypatch.setattr(checkpoint, "load_model", lambda path, **told: told)
    settings = model("builtin:small", device="auto", tensor_parallel=2, devices=[2, 3])
    told: Any = load_model_of(settings, str(rank_devices(settings)[rank]) if rank else None)
    assert (told["device"], told["ranks"]) == (device, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": [0, 1, 2], "device": "auto"},
        {"device": "cuda:1"},
        {"draft": "other"},
        {"quantization": "int8"},
    ],
)
def test_what_ranks_cannot_do_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel"):
        model("none", **{"tensor_parallel": 2, **changes})


def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    settings = model(save_model(tmp_path), tensor_parallel=4)
    with pytest.raises(SettingsError, match=r"4 ranks cannot share 4 heads with 2"):
        load_engine(settings)
