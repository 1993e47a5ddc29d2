"""Small random encoder-decoders of every family that is served, in memory and as folders."""

from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSeq2SeqLM

VOCABULARY: Final = 97
POSITIONS: Final = 64
END: Final = 1
_TOKENS: Final = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": END}
_RELATIVE: Final[dict[str, Any]] = {
    "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "initializer_factor": 3.0,
}  # fmt: skip
_ABSOLUTE: Final[dict[str, Any]] = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": POSITIONS, "init_std": 0.6,
}  # fmt: skip
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "t5": _RELATIVE | {"n_positions": POSITIONS},
    "mt5": _RELATIVE,
    "umt5": _RELATIVE,
    "bart": _ABSOLUTE,
    "marian": _ABSOLUTE,
    "pegasus": _ABSOLUTE,
}
"""Configurations by family."""
GENERATION: Final[dict[str, dict[str, Any]]] = {
    "bart": {"forced_bos_token_id": 5},
    "marian": {"bad_words_ids": [[0], [83]]},
}
"""What these families have in their generation_config.json."""


def tiny_seq2seq(family: str, seed: int = 0, **changes: Any) -> Any:
    """The model; the same seed gives the same weights. ``changes``: of its configuration."""
    torch.manual_seed(seed)
    values = {"vocab_size": VOCABULARY, "d_model": 32, **_TOKENS, **FAMILIES[family], **changes}
    make: Any = AutoModelForSeq2SeqLM.from_config
    model = make(AutoConfig.for_model(family, **values)).eval()
    model.generation_config.update(**GENERATION.get(family, {}))
    return model


def save_seq2seq(folder: Path, family: str, seed: int = 0) -> Path:
    """Writes it to ``folder`` in Hugging Face layout, with a tokenizer of words "w2", "w3" and so on."""
    tiny_seq2seq(family, seed).save_pretrained(folder)
    words = {"<pad>": 0, "</s>": END} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "<pad>"}')
    return folder
