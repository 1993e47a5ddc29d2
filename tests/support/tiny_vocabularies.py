"""Tokenizers of every kind, trained in a moment on a few English words, and texts with characters unknown to them."""

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL: Final = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
CORPUS: Final = (
    "hello world", "a cat sat on the mat", "rain falls on warm roads", "the question is old",
    "we sailed at dawn and came back", "words and more words",
) * 20  # fmt: skip
TEXTS: Final = (
    "hello world", "héllo wörld", "Straße, naïve café", "中文", "東京タワー hello", "مرحبا بالعالم",
    "हिन्दी भाषा", "ไทย", "한국어 hello", "😀", "hello 👩‍👩‍👧‍👦 world 🏳️‍🌈", "e\u0301\u0323 a\u030a", "\u0301", "ﬁne ①②",
    "x\u200by\u00ada", "\u202eabc", "a\tb\nc\r\n", "  two  blanks  ", "", " ", "\n\t ", "\u3000", "\ufeff",
    "hello" + "中" * 20, "Ω≈ç√∫ the cat",
)  # fmt: skip
"""Of many scripts; combining marks, joined emoji, marks of direction, empty and blank ones."""


def unigram(*, byte_fallback: bool = False) -> Tokenizer:
    """As SentencePiece's; the one for unknown characters is a special token too, as in T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=[*SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if byte_fallback:
        described = json.loads(tokenizer.to_str())
        described["model"]["vocab"] += [[f"<0x{byte:02X}>", -9.0] for byte in range(256)]
        described["model"]["byte_fallback"] = True
        tokenizer = Tokenizer.from_str(json.dumps(described))
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=90, special_tokens=[*SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_pairs() -> Tokenizer:
    """As RoBERTa's: every byte is known."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[*SPECIAL], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def pairs(unknown: str | None = "<unk>") -> Tokenizer:
    """Pairs of characters; without ``unknown`` those that it does not know are left out."""
    tokenizer = Tokenizer(models.BPE(unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=[*SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: Final[dict[str, Any]] = {
    "unigram": unigram,
    "unigram-bytes": lambda: unigram(byte_fallback=True),
    "word-piece": word_piece,
    "byte-pairs": byte_pairs,
    "pairs": pairs,
    "pairs-nothing-unknown": lambda: pairs(None),
}


def save_vocabulary(folder: Path, kind: str, *, context: int, single: str, pair: str) -> Tokenizer:
    """Writes one of `KINDS` to ``folder``; ``single`` and ``pair``: what it puts around texts."""
    tokenizer: Tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([*SPECIAL])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single, pair, ends)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context,
        "bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
        "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer
