"""The memory and the numbers of devices, with a stand-in for torch.cuda."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model_workers.engine import devices
from model_workers.engine.checkpoint import load_engine
from model_workers.engine.devices import (
    cache_bytes,
    check_weights_fit,
    find_device,
    find_dtype,
    memory_limit,
)
from sluice.settings import ModelSettings, SettingsError
from tests.support.tiny_models import save_model

GB = 10**9
CUDA = torch.device("cuda", 1)
CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Two devices of 80 GB: what is free on each, and what this process has reserved, GB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def tell(free_gb: float, mine_gb: float) -> None:
        found = int(free_gb * GB), 80 * GB
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: found)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(mine_gb * GB))

    tell(80, 0)
    return tell


@pytest.mark.parametrize(
    ("name", "expected"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")],
)
def test_devices_by_name(name: str, expected: str, cuda: object) -> None:
    assert find_device(name) == torch.device(expected)


def test_a_device_that_is_not_there_is_refused(cuda: object, tmp_path: Path) -> None:
    settings = ModelSettings(name="tiny", path=str(save_model(tmp_path)), device="cuda:2")
    with pytest.raises(SettingsError, match=r"^device: cuda:2 is not there: .* 2 CUDA"):
        load_engine(settings)


def test_without_cuda_every_number_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")
    with pytest.raises(SettingsError, match="sees 0 CUDA devices"):
        find_device("cuda")
    with pytest.raises(SettingsError, match="not a torch device"):
        find_device("abacus")


def test_models_that_load_together_do_not_claim_memory_twice(
    cuda: Callable[[float, float], None],
) -> None:
    # Both have loaded their weights of 10 GB, and neither its cache.
    cuda(60, 10)
    both = 2 * cache_bytes(CUDA, 0.5)
    assert both == pytest.approx(2 * (40 - 10) * GB * devices.CUDA_SHARE)
    assert both < 60 * GB


def test_a_model_that_loads_behind_another_still_has_its_share(
    cuda: Callable[[float, float], None],
) -> None:
    cuda(40 - 10, 10)
    assert memory_limit(CUDA, 0.5) == 40 * GB


def test_what_others_hold_is_not_counted_on(cuda: Callable[[float, float], None]) -> None:
    cuda(12, 10)
    assert cache_bytes(CUDA, 0.5) == pytest.approx(12 * GB * devices.CUDA_SHARE)
    cuda(0, 50)
    assert cache_bytes(CUDA, 0.5) == 0


def test_weights_that_do_not_fit_say_by_how_much(cuda: object) -> None:
    check_weights_fit(CUDA, 0.5, 39 * GB)
    with pytest.raises(
        SettingsError, match=r"take 45 GB, 5 GB more than .* cuda:1: raise its memory"
    ):
        check_weights_fit(CUDA, 0.5, 45 * GB)


def test_eight_bits_are_refused_on_cuda(cuda: object, tmp_path: Path) -> None:
    settings = ModelSettings(
        name="tiny", path=str(save_model(tmp_path)), device="cuda", quantization="int8"
    )
    with pytest.raises(SettingsError, match=r"quantization: int8 is for CPUs, .* take fp8"):
        load_engine(settings)


def test_auto_computes_exactly_on_every_processor() -> None:
    assert find_dtype("auto", CPU) is torch.float32
    assert find_dtype("auto", CUDA) is torch.bfloat16
    assert find_dtype("bfloat16", CPU) is torch.bfloat16
