"""The two tiers: their shapes, what they are trained on and for how long."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from transformers import LlamaConfig

from model_workers.desk.example import Cell
from model_workers.desk.tokenizer import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Tier:
    """A model size with its training budget."""

    name: str
    hidden: int
    layers: int
    heads: int
    mlp: int
    steps: int
    examples_per_step: int
    mix: Mapping[Cell, float]

    def config(self) -> LlamaConfig:
        """The Llama configuration of this tier."""
        return LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.04,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=5,
        )


TIERS: Final = {
    "small": Tier(
        name="small",
        hidden=64,
        layers=3,
        heads=4,
        mlp=192,
        steps=12000,
        examples_per_step=64,
        mix={
            ("classify", "easy"): 0.6,
            ("extract", "easy"): 2,
            ("reply", "easy"): 1.2,
            ("sort", "easy"): 1.2,
            ("sort", "mid"): 0.6,
            ("total", "easy"): 1,
        },
    ),
    "large": Tier(
        name="large",
        hidden=128,
        layers=6,
        heads=4,
        mlp=384,
        steps=7500,
        examples_per_step=64,
        mix={
            ("classify", "easy"): 0.5,
            ("extract", "easy"): 1.2,
            ("reply", "easy"): 0.8,
            ("sort", "easy"): 0.5,
            ("sort", "mid"): 1.2,
            ("sort", "hard"): 2.2,
            ("total", "easy"): 0.6,
            ("total", "mid"): 1,
            ("total", "hard"): 1.6,
        },
    ),
}
