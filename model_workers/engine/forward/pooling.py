"""From hidden states to embeddings: the modules of sentence-transformers after a transformer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from sluice.settings import SettingsError
from sluice.settings.sentence_folder import Module, read_json

_MODES: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of the modes in older folders."""


def _weighted(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, len(hidden) + 1, device=hidden.device, dtype=hidden.dtype)
    return weights @ hidden / weights.sum()


POOLING: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.amax(0),
    "mean": lambda hidden: hidden.mean(0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(0) / len(hidden) ** 0.5,
    "weightedmean": _weighted,
    "lasttoken": lambda hidden: hidden[-1],
}
"""Functions from the hidden states of a text [tokens, size] to one vector."""
_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Identity": lambda x: x,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
}


class Pipeline:
    """Pooling, then dense layers, then optionally a norm.

    Attributes:
        normalizes: Whether embeddings have length 1.
    """

    def __init__(self, modules: Sequence[Module], device: torch.device) -> None:
        """Create a pipeline; without `modules` it is mean pooling.

        Raises:
            SettingsError: A module is not served, or cannot be read.
        """
        kinds = [module.kind for module in modules]
        self.normalizes = kinds[-1:] == ["Normalize"]
        served = [*(["Pooling"] if kinds else []), *(kind for kind in kinds[1:] if kind == "Dense")]
        if kinds != served + (["Normalize"] if self.normalizes else []):
            raise SettingsError(
                f"modules.json: {', '.join(kinds)}: only Pooling, Dense and Normalize are served, in this order"
            )
        self._pool = _pooling(modules[0].folder) if modules else [POOLING["mean"]]
        self._dense = [
            _dense(module.folder, device) for module in modules if module.kind == "Dense"
        ]

    @torch.inference_mode()
    def __call__(self, hidden: Sequence[Tensor]) -> Tensor:
        """Return the embeddings [texts, size] of texts by their hidden states."""
        pooled = torch.stack(
            [torch.cat([pool(states) for pool in self._pool]) for states in hidden]
        )
        for layer in self._dense:
            pooled = layer(pooled)
        return functional.normalize(pooled, dim=1) if self.normalizes else pooled


def _pooling(folder: Path) -> list[Callable[[Tensor], Tensor]]:
    config = read_json(folder / "config.json")
    if config.get("include_prompt") is False:
        raise SettingsError(
            f"{folder}: include_prompt: false is not served: prompts count as text here"
        )
    named = config.get("pooling_mode") or [mode for key, mode in _MODES.items() if config.get(key)]
    modes = [named] if isinstance(named, str) else list(named)
    unknown = [mode for mode in modes if mode not in POOLING]
    if unknown or not modes:
        raise SettingsError(f"{folder}: pooling {unknown or 'without a mode'} is not served")
    return [POOLING[mode] for mode in modes]


def _dense(folder: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    config = read_json(folder / "config.json")
    activation = activation_of(str(config.get("activation_function", "Tanh") or "Identity"))
    if config.get("use_residual"):
        raise SettingsError(f"{folder}: use_residual is not served")
    sizes = config["in_features"], config["out_features"]
    layer = nn.Linear(*sizes, bias=bool(config.get("bias", True)))
    try:
        nn.ModuleDict({"linear": layer}).load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, RuntimeError, SafetensorError) as error:
        problem = " ".join(str(error).split())
        raise SettingsError(
            f"{folder}: its weights cannot be read: {problem}; copy it again"
        ) from error
    layer = layer.to(device)
    return lambda x: activation(layer(x))


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function for the name of torch's class, with or without its module; raise SettingsError for others."""
    kind = name.rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise SettingsError(f"the activation {name} is not served, only {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[kind]
