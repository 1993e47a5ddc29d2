"""Folders of the fused families, read without transformers.

Importing transformers takes longer than the rest of a worker's start, and the fused path takes only the weights from
its models. Anything unusual is left to transformers: another kind of rotary embedding, sliding windows, quantized
weights, a tensor too many or too few.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_workers.engine.forward.kv_cache import LayerShape
from model_workers.model_folder import INDEX, WEIGHTS

FUSED: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Classes of transformers that `FusedModel` can compute."""

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUT: Final = ("self_attn.o_proj",)
_MLP: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS: Final = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class FusedWeights:
    """The weights of a fused family, by their names in a checkpoint; `FusedModel` takes them out.

    Attributes:
        shapes: Shapes of each layer's cache.
        inv_freq: Frequencies of the rotary embedding.
        attention_scaling: Its scale.
    """

    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    shapes: tuple[LayerShape, ...]
    inv_freq: Tensor
    attention_scaling: float = 1.0

    @classmethod
    def of(cls, model: Any, shapes: tuple[LayerShape, ...]) -> "FusedWeights":
        """Return the weights of a model of transformers."""
        tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
        rotary, config = model.model.rotary_emb, model.config.to_dict()
        return cls(config, tensors, shapes, rotary.inv_freq, rotary.attention_scaling)


def is_fused(model: Any) -> bool:
    """Return whether `FusedModel` can compute a model of transformers."""
    return type(model).__name__ in FUSED and model.config.hidden_act == "silu"


def read_config(path: str) -> dict[str, Any] | None:
    """Return the configuration of a folder that `read_folder` may read; None for any other."""
    try:
        config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) and _is_known(config) else None


def read_folder(
    path: str, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> FusedWeights | None:
    """Read the weights of a folder with a `config` of `read_config`; return None if they differ from it."""
    try:
        tensors = _read(Path(path), dtype, device)
    except (OSError, ValueError, SafetensorError):
        return None
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != _shapes(config):
        return None
    size = _head_size(config)
    shape = LayerShape(config["num_attention_heads"], config["num_key_value_heads"], size, size)
    frequencies = 1.0 / (_theta(config) ** (torch.arange(0, size, 2, dtype=torch.float) / size))
    shapes = (shape,) * config["num_hidden_layers"]
    return FusedWeights(
        config, tensors, shapes, frequencies.to(next(iter(tensors.values())).device)
    )


def _read(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Read all tensors of a folder, each straight onto the device."""
    files = {WEIGHTS}
    if not (folder / WEIGHTS).exists():
        files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        with safe_open(folder / name, framework="pt", device=str(device)) as file:
            tensors |= {key: file.get_tensor(key).to(dtype) for key in file.keys()}  # noqa: SIM118 (not iterable)
    return tensors


def _is_known(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    return (
        isinstance(architectures, list)
        and len(architectures) == 1
        and architectures[0] in FUSED
        and config.get("hidden_act") == "silu"
        and "quantization_config" not in config
        and all(isinstance(config.get(key), int) for key in _SIZES)
        and isinstance(config.get("rms_norm_eps"), float)
        and isinstance(config.get("tie_word_embeddings"), bool)
        and set(config.get("layer_types") or ()) <= {"full_attention"}
        and (not config.get("sliding_window") or config.get("use_sliding_window") is False)
        and _theta(config) > 0
    )


def _theta(config: Mapping[str, Any]) -> float:
    """Return the base of the plain rotary embedding; 0 if it is another one."""
    rope = config.get("rope_parameters")
    if rope is None and not config.get("rope_scaling"):
        rope = {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    if not isinstance(rope, dict) or rope.keys() != {"rope_type", "rope_theta"}:
        return 0.0
    theta = rope["rope_theta"]
    plain = rope["rope_type"] == "default" and "partial_rotary_factor" not in config
    return float(theta) if plain and isinstance(theta, int | float) else 0.0


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of exactly the tensors that a folder with `config` must have."""
    (kind,) = config["architectures"]
    size, words, head = config["hidden_size"], config["vocab_size"], _head_size(config)
    shapes = {"model.embed_tokens.weight": (words, size), "model.norm.weight": (size,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (words, size)
    biases: tuple[str, ...] = ()
    if kind == "Qwen2ForCausalLM":
        biases += _QKV
    elif kind != "MistralForCausalLM" and config.get("attention_bias"):
        biases += (*_QKV, *_OUT)
    if kind == "LlamaForCausalLM" and config.get("mlp_bias"):
        biases += _MLP
    queries, keys = (head * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    inner = config["intermediate_size"]
    outputs = (queries, keys, keys, size, inner, inner, size)
    inputs = (size, size, size, queries, size, size, inner)
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name in _NORMS}
    for name, rows, columns in zip((*_QKV, *_OUT, *_MLP), outputs, inputs, strict=True):
        layer[f"{name}.weight"] = (rows, columns)
        if name in biases:
            layer[f"{name}.bias"] = (rows,)
    if kind == "Qwen3ForCausalLM":
        layer |= {f"{name}.weight": (head,) for name in _HEAD_NORMS}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes
