"""A classifier of prompts in the manner of Prompt Guard, trained from nothing in a few seconds.

Sentences are made of templates and words; it learns that those which tell a model to drop its instructions are
INJECTION.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification

LABELS: Final = ("BENIGN", "INJECTION")
CONTEXT: Final = 64
_STEPS: Final = 200
_ROWS: Final = 32
_BESIDE: Final = 28
"""Words on each side of an injection, so that all fit the context."""

_VERBS: Final = ("ignore", "forget", "disregard", "override", "drop")
_WHICH: Final = ("all", "your", "previous", "earlier", "the")
_RULES: Final = ("instructions", "rules", "guidelines", "orders", "prompts")
_ASKS: Final = ("what", "where", "when", "how", "why")
_THINGS: Final = ("order", "lamp", "parcel", "invoice", "bike", "refund", "ticket", "total")
_FILL: Final = ("please", "and", "is", "my", "now", "say", "tell", "me", "about", "of", "then")


def attack(draw: random.Random) -> list[str]:
    """The words of an injection; around them stands anything, often a question."""
    core = [draw.choice(_VERBS), draw.choice(_WHICH), draw.choice(_RULES)]
    before, after = (_some(question, draw, 4) for _ in range(2))
    return [*before[-_BESIDE:], *core, *after[:_BESIDE]]


def question(draw: random.Random) -> list[str]:
    """The words of an ordinary question, which may have those of an injection one by one."""
    odd = draw.choice((*_WHICH, *_VERBS, *_RULES, "my"))
    core = [draw.choice(_ASKS), "is", odd, draw.choice(_THINGS)]
    return [*_around(draw), *core, *_around(draw)]


def questions(draw: random.Random) -> list[str]:
    """The words of one question or several."""
    return [*question(draw), *_some(question, draw, 8)][: 2 * _BESIDE]


def save_classifier(folder: Path, seed: int = 0, steps: int = _STEPS) -> Path:
    """Trains it for so many steps, and writes it to ``folder`` in Hugging Face layout."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    tokenizer = _tokenizer()
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
    )
    model: Any = BertForSequenceClassification(config)
    _train(model, tokenizer, random.Random(seed), steps)
    model.eval().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    return folder


def _some(make: Callable[[random.Random], list[str]], draw: random.Random, most: int) -> list[str]:
    return [word for _ in range(draw.randrange(most + 1)) for word in make(draw)]


def _around(draw: random.Random) -> list[str]:
    return [draw.choice((*_FILL, *_THINGS)) for _ in range(draw.randrange(5))]


def _tokenizer() -> Tokenizer:
    words = (
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *_VERBS,
        *_WHICH,
        *_RULES,
        *_ASKS,
        *_THINGS,
        *_FILL,
    )
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def _train(model: Any, tokenizer: Tokenizer, draw: random.Random, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        truth = [draw.randrange(2) for _ in range(_ROWS)]
        texts = [" ".join(attack(draw) if one else questions(draw)) for one in truth]
        inputs = _padded([tokenizer.encode(text).ids for text in texts])
        loss = model(**inputs, labels=torch.tensor(truth)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}
