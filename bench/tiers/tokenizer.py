"""The shared tokenizer: byte-level BPE of 1,024 tokens, learned from the generated tasks.

Every byte has a token, so any text encodes and comes back exactly. A digit is always a token of
its own: numbers then look the same everywhere, which arithmetic and copying need.
"""

import json
from pathlib import Path
from typing import Final, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from model_workers.tiers.example import CELLS
from model_workers.tiers.tasks import generate

PAD, BOS, SYSTEM, USER, ASSISTANT, END = SPECIALS = (
    "<|pad|>",
    "<|bos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
VOCAB_SIZE: Final = 1024
# A digit; a word with the space before it; other signs up to the space of a word that follows.
_PIECES: Final = r"\p{N}| ?\p{L}+|[^\p{L}\p{N}]+?(?= \p{L})|[^\p{L}\p{N}]+"
_CHAT_TEMPLATE: Final = (
    "<|bos|>{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# System turns seen in training, so that one in front of a task does not throw the model off.
SYSTEM_TURNS: Final = (
    "You are the support desk assistant.",
    "You are a helpful assistant.",
    "You work for an online shop. Be brief and polite.",
)


def train_tokenizer(seed: int = 0, n_per_cell: int = 1500) -> PreTrainedTokenizerFast:
    """Learn the merges from `n_per_cell` training examples of every cell."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [t for c in CELLS for e in generate(seed, n_per_cell, c) for t in (e.prompt, e.answer)]
    bpe.train_from_iterator([*texts, *SYSTEM_TURNS * 20], trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer and the generation defaults that go with it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _name_portably(folder / "tokenizer_config.json")
    GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def _name_portably(config_file: Path) -> None:
    # The class name and the list of roles as transformers 4 knows them too: 5 reads both.
    config = json.loads(config_file.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for here_only in ("backend", "is_local", "local_files_only"):
        config.pop(here_only, None)
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a folder."""
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder))
