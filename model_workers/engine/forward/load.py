"""Loads a model folder onto a paged cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_workers.engine.blocks import CPU_BLOCK_TOKENS
from model_workers.engine.devices import find_device, find_dtype
from model_workers.engine.forward.attention import Attention, PagedAttention
from model_workers.engine.forward.flash import (
    FLASH_BLOCK_TOKENS,
    FlashAttention,
    FlashKvCache,
    flash_fits,
)
from model_workers.engine.forward.fused_folder import (
    FusedWeights,
    is_fused,
    read_config,
    read_folder,
)
from model_workers.engine.forward.kv_cache import KvCache, LayerShape
from model_workers.engine.forward.linear import FP8_CAPABILITY
from model_workers.engine.forward.llama import FusedModel
from model_workers.engine.paged_model import PagedModel
from model_workers.model_folder import CONFIG
from sluice.settings import SettingsError
from sluice.settings.models import computed_context_of
from sluice.settings.sentence_folder import read_json


@dataclass(frozen=True)
class LoadedModel:
    """A model whose weights are in memory, without a cache yet.

    Attributes:
        context_tokens: Maximum length of a sequence.
    """

    path: str
    context_tokens: int
    device: torch.device
    dtype: torch.dtype
    quantization: str
    ranks: int
    _model: Any
    _shapes: tuple[LayerShape, ...]

    def bytes_per_block(self, block_tokens: int) -> int:
        """Return the memory of a cache block in all layers."""
        values = sum(s.kv_heads * (s.key_size + s.value_size) for s in self._shapes)
        return values * block_tokens * self.dtype.itemsize

    def paged(self, num_blocks: int, block_tokens: int, step_tokens: int = 0) -> PagedModel:
        """Return the model on an empty cache; call it once, because the weights are rearranged for it without a copy.

        Args:
            num_blocks: Number of blocks.
            block_tokens: Tokens per block.
            step_tokens: Maximum number of tokens of decoding sequences, drafted ones included, that go through CUDA
                graphs.

        Raises:
            SettingsError: The device needs blocks of another size.
            torch.OutOfMemoryError: The cache does not fit.
        """
        attention = self._attention(num_blocks, block_tokens)
        if isinstance(self._model, FusedWeights):
            model = FusedModel(self._model, attention, self.context_tokens, self.quantization)
            model.capture_graphs(step_tokens)
            return model
        from model_workers.engine.forward.hub import HubModel

        return HubModel(self._model, attention, self.context_tokens)

    def block_tokens(self) -> int:
        """Return the preferred block size on this device."""
        return FLASH_BLOCK_TOKENS if self._has_flash() else CPU_BLOCK_TOKENS

    def _attention(self, num_blocks: int, block_tokens: int) -> Attention:
        sizes = self._shapes, num_blocks, block_tokens, self.dtype, self.device
        if not self._has_flash():
            return PagedAttention(KvCache(*sizes))
        if block_tokens % FLASH_BLOCK_TOKENS:
            raise SettingsError(f"block_tokens: on this device a multiple of {FLASH_BLOCK_TOKENS}")
        return FlashAttention(FlashKvCache(*sizes))

    def _has_flash(self) -> bool:
        return flash_fits(self._shapes, self.dtype, self.device)


def load_model(
    path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    context_tokens: int | None = None,
    quantization: str = "none",
    ranks: int = 1,
) -> LoadedModel:
    """Load the model of a folder or hub id.

    Args:
        path: Folder or hub id.
        device: Name of the device.
        dtype: "float32", "bfloat16" or "auto" (`find_dtype`).
        context_tokens: Maximum length of a sequence; None: that of the model.
        quantization: "none", or "int8" or "fp8" for the weights of linear layers.
        ranks: Number of processes of the current process group that share it.

    Raises:
        SettingsError: It is not a decoder-only model, cannot be computed on the paged cache, has a shorter context, or
            the device does not exist or does not compute `quantization`.
        ValueError, OSError: It cannot be read.
    """
    where = find_device(device)
    number = find_dtype(dtype, where)
    _check_quantization(quantization, where)
    fused = read_config(path) if ranks == 1 else None
    if fused is not None:
        context = find_context(path, fused, context_tokens)
        folder = read_folder(path, fused, number, where)
        if folder is not None:
            return LoadedModel(path, context, where, number, quantization, 1, folder, folder.shapes)
    # Imported here: a worker that needs no code of transformers starts in a third of the time.
    from model_workers.engine.forward import hub

    config = hub.read_config(path)
    context = find_context(path, config.to_dict(), context_tokens)
    model, shapes = hub.read_weights(path, config, number, where, quantization, context, ranks)
    if ranks == 1 and is_fused(model):
        model = FusedWeights.of(model, shapes)
    return LoadedModel(path, context, where, number, quantization, ranks, model, shapes)


def _check_quantization(quantization: str, device: torch.device) -> None:
    if quantization == "int8" and device.type != "cpu":
        raise SettingsError(
            "quantization: int8 is for CPUs, on other devices it is slower than without; take fp8, or leave it out"
        )
    if quantization == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise SettingsError(
                f"quantization: fp8 needs a device of compute capability {'.'.join(map(str, FP8_CAPABILITY))}, "
                f"{device} has {'.'.join(map(str, capability))}; leave it out"
            )


def find_context(path: str, config: Mapping[str, Any], tokens: int | None) -> int:
    """Return the context length: the wanted one, up to that of the model's config.json as a gateway reads it.

    Args:
        path: Folder or hub id.
        config: The configuration as transformers reads it, for what the file does not say.
        tokens: The setting, if any.

    Raises:
        SettingsError: It is longer than the model's, or neither is known.
    """
    file = Path(path, CONFIG)
    file_limit = computed_context_of(read_json(file)) if file.is_file() else None
    limit = file_limit or computed_context_of(config)
    if not limit and tokens is None:
        raise SettingsError(f"{path}: set context_tokens, the model names none")
    if limit and tokens is not None and tokens > limit:
        raise SettingsError(f"{path}: context_tokens is {tokens}, the model allows at most {limit}")
    return tokens or limit or 0
