"""A Llama of a Hugging Face folder with its tokenizer as a GGUF file, for llama.cpp. Needs the package ``gguf``."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_LAYER = {
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


def write_gguf(file: Path, folder: Path) -> Path:
    """Writes the model in ``folder`` to ``file``, in float32."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer: Any = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, folder, gguf.TokenType)
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(_name(name), _ordered(name, tensor.float(), config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, folder: Path, kinds: Any) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if t in special else kinds.NORMAL for t in tokens])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    named = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_bos_token_id(vocabulary["<|bos|>"])
    writer.add_eos_token_id(vocabulary[named["eos_token"]])
    writer.add_chat_template(named["chat_template"])


def _name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight"}.get(name, "output_norm.weight")
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def _ordered(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp rotates neighbouring numbers of a head, transformers those of its two halves."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
