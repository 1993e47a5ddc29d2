"""Small arrays on their way to the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """``values`` as a tensor, copied without waiting for the device: that needs pinned memory."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """``values`` in float32, shape (rows, 1), on the device of ``like``."""
    return on_device(np.array(values, np.float32), like.device).unsqueeze(-1)
