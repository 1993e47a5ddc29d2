"""Small random models of several families, in memory and as folders in Hugging Face layout."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97
CONTEXT = 256
WINDOW = 20
FAMILIES = ("llama", "qwen2", "gpt2")

OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW},
}


def config(family: str, **changes: Any) -> Any:
    """The configuration of a family."""
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
        return AutoConfig.for_model(family, vocab_size=VOCABULARY, **sizes, **tokens, **changes)
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
    }
    return AutoConfig.for_model(family, **(values | tokens | OWN_SIZES.get(family, {}) | changes))


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random model whose greedy answers vary."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config(family, **changes), attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model.eval()


def save_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Writes a tiny model with a word-level tokenizer to ``folder``."""
    tiny_model(family, **changes).to(torch.bfloat16).save_pretrained(folder)
    return save_words(folder)


def save_words(folder: Path, **parts: Any) -> Path:
    """Writes a tokenizer of the words w0, w1 and so on, with further ``parts``."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{number}": number for number in range(VOCABULARY)},
            "unk_token": "w0",
        },
        **parts,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder
