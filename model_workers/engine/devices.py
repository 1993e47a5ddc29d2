"""The device of a worker: whether it exists, and how much of its memory the worker may use."""

from typing import Any, Final

import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice.settings import SettingsError

TOLERANCES: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Maximum difference of logits by rounding in two ways to compute them, as a share of their range."""
CPU_SHARE: Final = 0.5
"""Default share of the available memory that the caches of all workers may use on a CPU."""
CUDA_SHARE: Final = 0.85
"""Share of what the weights leave that a worker's cache uses; the rest is for computing steps."""


def find_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA if there is a device, else the CPU.

    Raises:
        SettingsError: There is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"device: {name!r} is not a torch device") from error
    if device.type != "cuda":
        return device
    there, number = torch.cuda.device_count(), device.index or 0
    if number >= there:
        raise SettingsError(f"device: cuda:{number} is not there: torch sees {there} CUDA devices")
    return torch.device("cuda", number)


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the number format to compute in; "auto" is float32 on a CPU, else bfloat16 (see engine-numerics.md)."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def memory_limit(device: torch.device, share: float | None) -> int:
    """Return the bytes that this process may use on a CUDA device: its share, as far as others leave it."""
    free, total = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    return min(int(total * (share or 1.0)), int(free) + mine)


def check_weights_fit(device: torch.device, share: float | None, weight_bytes: int) -> None:
    """Raise an error for weights that are larger than a worker's share of its device.

    Raises:
        SettingsError: By how much, and what to change.
    """
    if device.type != "cuda":
        return
    limit = memory_limit(device, share)
    if weight_bytes > limit:
        raise SettingsError(
            f"its weights take {weight_bytes / 1e9:.3g} GB, "
            f"{(weight_bytes - limit) / 1e9:.3g} GB more than it may take on {device}: raise its memory_share, "
            "serve fewer models or replicas on this device, or take a smaller model"
        )


def cache_bytes(device: torch.device, share: float | None) -> float:
    """Return the default size of a cache, beside the weights."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available) * CPU_SHARE * (share or 1.0)
    free_bytes = memory_limit(device, share) - torch.cuda.memory_reserved(device)
    return max(0, free_bytes) * CUDA_SHARE


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return values of the host on a device, copied from pinned memory without waiting for it."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
