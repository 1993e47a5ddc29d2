"""Small random models of families that only transformers' own `generate()` computes rightly, as folders."""

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.tiny_models import CONTEXT, VOCABULARY, save_words
from tests.support.tiny_seq2seq import save_seq2seq

END: Final = 2
PICTURE: Final = 96
_TOKENS: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
_LLAMA: Final[dict[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, **_TOKENS,
}  # fmt: skip
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "model_type": "clip_vision_model",
}  # fmt: skip
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": _LLAMA,
    "diffllama": _LLAMA,
    "bart": {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64, "max_position_embeddings": CONTEXT, "is_encoder_decoder": False, **_TOKENS,
    },
    "opt": {
        "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 64, "max_position_embeddings": CONTEXT, **_TOKENS,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **_TOKENS},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, **_TOKENS},
    "mixtral": {"num_local_experts": 4, **_LLAMA},
    "llava": {
        "vision_config": _VISION, "text_config": {"model_type": "llama", **_LLAMA}, "image_token_index": PICTURE,
    },
}  # fmt: skip
"""Configurations of decoders by family; those of tiny_seq2seq.py read a text first."""


def tiny(family: str) -> Any:
    """Return a random model whose greedy answers vary."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kind: Any = AutoModelForImageTextToText if family == "llava" else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model.eval()


def save(folder: Path, family: str) -> Path:
    """Write a model with a tokenizer of the words w0, w1 and so on."""
    if family not in FAMILIES:
        return save_seq2seq(folder, family)
    tiny(family).save_pretrained(folder)
    return save_words(folder, decoder={"type": "Fuse"})
