"""Tiny models of random weights that read texts: embedding models in sentence-transformers' layout, and a reranker."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedConfig

WORDS: Final = [f"w{number}" for number in range(100)]
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTEXT: Final = 64
SIZE: Final = 32


def config_of(kind: str, **changes: Any) -> PreTrainedConfig:
    """A tiny configuration of a family of transformers."""
    from transformers import AutoConfig

    values = {
        "vocab_size": len(_SPECIAL) + len(WORDS),
        "hidden_size": SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
    }
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**values, **changes})
    return config


def save_transformer(folder: Path, config: PreTrainedConfig, seed: int = 0) -> Path:
    """A random model with a tokenizer."""
    torch.manual_seed(seed)
    model: Any = AutoModel.from_config(config)
    model.eval().save_pretrained(folder)
    return save_tokenizer(folder)


def save_reranker(folder: Path, **changes: Any) -> Path:
    """A random BERT with a head of one label."""
    torch.manual_seed(1)
    config = config_of("bert", num_labels=1, **changes)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():  # far enough from 0 that scores differ
        model.classifier.weight.mul_(50)
    model.eval().save_pretrained(folder)
    return save_tokenizer(folder)


def save_tokenizer(folder: Path) -> Path:
    """Words, [CLS] and [SEP]; lower case."""
    vocabulary = {word: number for number, word in enumerate((*_SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("pad", "unk", "cls", "sep", "mask")
    tokens = {f"{name}_token": token for name, token in zip(names, _SPECIAL, strict=True)}
    about: dict[str, Any] = {
        **tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
    }
    about["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def add_modules(
    folder: Path,
    pooling: Mapping[str, Any],
    *,
    dense: int = 0,
    normalize: bool = False,
    about: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
) -> Path:
    """Makes the folder one of sentence-transformers. ``dense``: numbers of an embedding behind a dense layer."""
    kinds = [
        "Transformer",
        "Pooling",
        *(["Dense"] if dense else []),
        *(["Normalize"] if normalize else []),
    ]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": SIZE, **pooling})
    if dense:
        _save_dense(folder / "2_Dense", dense)
    _write(folder / "config_sentence_transformers.json", about or {})
    _write(
        folder / "sentence_bert_config.json",
        limits or {"max_seq_length": CONTEXT, "do_lower_case": False},
    )
    return folder


def _save_dense(folder: Path, size: int) -> None:
    values = {"in_features": SIZE, "out_features": size, "bias": True}
    _write(
        folder / "config.json",
        {**values, "activation_function": "torch.nn.modules.activation.Tanh"},
    )
    draw = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(size, SIZE, generator=draw), torch.randn(size, generator=draw)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "model.safetensors")


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def texts(count: int, seed: int = 0, most: int = CONTEXT - 2) -> list[str]:
    """Random texts of 1 to ``most`` words."""
    draw = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(below, (1,), generator=draw))

    return [
        " ".join(WORDS[number(len(WORDS))] for _ in range(1 + number(most))) for _ in range(count)
    ]


def ids_of(folder: Path, said: Sequence[str]) -> list[list[int]]:
    """The tokens of texts."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in said]
