"""A Llama of random weights, the same for every side of a benchmark."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sluice.settings.models import resolve_model_path


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int

    @property
    def weight_bytes(self) -> int:
        """Of what a step reads, in bfloat16: all weights but the table of embeddings."""
        kv = self.hidden * self.kv_heads // self.heads
        layer = 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.inner
        return 2 * (self.layers * layer + self.hidden * self.vocab)

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of all layers, in bfloat16."""
        return 2 * 2 * self.layers * self.hidden * self.kv_heads // self.heads

    def config(self) -> Any:
        """Without tokens that could end an answer."""
        config: Any = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=self.context,
            # Wider than usual, so that answers of random weights vary.
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        return config


SMALL: Final = Shape(512, 1536, layers=8, heads=8, kv_heads=4, vocab=4096, context=2048)
"""29 M parameters: what a CPU serves."""
MEDIUM: Final = Shape(768, 2240, layers=10, heads=12, kv_heads=12, vocab=1024, context=1024)
"""76 M parameters: what a CPU serves slowly enough that messages are not all that counts."""
LARGE: Final = Shape(4096, 14336, layers=32, heads=32, kv_heads=8, vocab=128256, context=4096)
"""8 B parameters: what a GPU serves."""

TOKENIZER: Final = "tokenizer*"


def write_model(folder: Path, shape: Shape, device: str = "cpu") -> Path:
    """Saves a model in bfloat16; the same one for the same shape and device."""
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        model = make(shape.config(), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    # The sides need its memory.
    torch.cuda.empty_cache()
    return folder


def write_served_model(folder: Path, shape: Shape = SMALL) -> Path:
    """Save a model with a shipped tokenizer: what a mesh needs."""
    write_model(folder, shape)
    for file in Path(resolve_model_path("builtin:large")).glob(TOKENIZER):
        shutil.copy(file, folder)
    return folder


def prompts(seed: int, count: int, shortest: int, longest: int, vocab: int) -> list[list[int]]:
    """Random prompts of evenly spread lengths."""
    random = Random(seed)
    steps = max(1, count - 1)
    lengths = [shortest + (longest - shortest) * i // steps for i in range(count)]
    random.shuffle(lengths)
    return [[random.randrange(1, vocab) for _ in range(length)] for length in lengths]
