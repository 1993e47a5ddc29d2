"""The weights of a saved Llama as a GGUF file, for llama.cpp. Needs the package ``gguf``."""

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.support.llama_model import Shape

_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_REST: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(file: Path, model_folder: Path, shape: Shape, dtype: str) -> Path:
    """Writes the model in ``model_folder`` to ``file``; without a tokenizer, since it is asked with token ids."""
    writer: Any = gguf.GGUFWriter(file, "llama")
    config = shape.config()
    whole = dtype == "float32"
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.ALL_F32 if whole else kinds.MOSTLY_BF16)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in load_file(model_folder / "model.safetensors").items():
        _add(writer, _gguf_name(name), _rope_order(name, tensor, shape), whole=whole)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name: str) -> str:
    if name in _REST:
        return _REST[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def _rope_order(name: str, weight: Tensor, shape: Shape) -> Tensor:
    """llama.cpp turns neighbouring dimensions of a head together, transformers those of its two halves."""
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _add(writer: Any, name: str, tensor: Tensor, *, whole: bool) -> None:
    if whole or tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().contiguous().numpy())
        return
    bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint8)
    writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
