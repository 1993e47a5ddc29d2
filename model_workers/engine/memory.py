"""How large the KV cache of an engine is."""

import math
from dataclasses import dataclass
from typing import Final

import psutil
import torch

from sluice.settings import ModelSettings, SettingsError

CPU_SHARE: Final = 0.5
"""Of the memory that is available at start, what a cache takes at most when nothing is set."""
CUDA_SHARE: Final = 0.85
"""Of the device memory that the weights leave free; the rest is for what a step computes with."""


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True)
class CacheSize:
    """How large a cache is.

    Attributes:
        block_bytes: of one block in all layers, a draft's included.
    """

    num_blocks: int
    block_tokens: int
    block_bytes: int

    @property
    def bytes(self) -> int:
        """Memory of the whole cache."""
        return self.num_blocks * self.block_bytes


def cache_size(
    settings: ModelSettings,
    *,
    context_tokens: int,
    block_tokens: int,
    block_bytes: int,
    free: int,
    on_cuda: bool,
) -> CacheSize:
    """As many blocks as ``cache_gb`` or a share of the ``free`` bytes holds, and no more than all slots could fill.

    Raises:
        SettingsError: not even one row of the context fits.
    """
    row = math.ceil(context_tokens / block_tokens)
    share = CUDA_SHARE if on_cuda else CPU_SHARE
    size = free * share if settings.cache_gb is None else settings.cache_gb * 1e9
    blocks = int(size // block_bytes)
    if blocks < row:
        raise SettingsError(
            f"models: {settings.name}: a row of {context_tokens} tokens needs a cache of "
            f"{row * block_bytes / 1e9:.3g} GB, and {size / 1e9:.3g} GB are there: "
            "raise cache_gb, or lower context_tokens"
        )
    return CacheSize(min(blocks, row * settings.slots), block_tokens, block_bytes)
