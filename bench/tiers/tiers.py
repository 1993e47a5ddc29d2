"""The two tiers: shapes, training data and training length."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from transformers import LlamaConfig

from bench.tiers.tokenizer import VOCAB_SIZE
from model_workers.tiers.example import Cell


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """A stretch of training: how many steps, how often each cell is drawn, how fast it learns.

    `rates` are the shares of the full learning rate at the start and the end, with a straight line
    between.
    """

    steps: int
    mix: Mapping[Cell, float]
    rates: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A model size with its training."""

    name: str
    hidden: int
    layers: int
    heads: int
    mlp: int
    phases: tuple[TrainingPhase, ...]
    examples_per_step: int = 64

    @property
    def steps(self) -> int:
        """All steps of the training."""
        return sum(phase.steps for phase in self.phases)

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


# The small tier is made for the easy levels: of longer lists it sees some to sort, and none to add.
_SMALL_MIX: Final[dict[Cell, float]] = {
    ("classify", "easy"): 0.6,
    ("extract", "easy"): 2,
    ("reply", "easy"): 1.2,
    ("sort", "easy"): 1.2,
    ("sort", "mid"): 0.6,
    ("total", "easy"): 1,
}
_SMALL_LAST_MIX: Final[dict[Cell, float]] = {
    **_SMALL_MIX,
    ("total", "easy"): 1.6,
    ("sort", "hard"): 0.06,
}
_LARGE_MIX: Final[dict[Cell, float]] = {
    ("classify", "easy"): 0.5,
    ("extract", "easy"): 1.2,
    ("reply", "easy"): 0.8,
    ("sort", "easy"): 0.5,
    ("sort", "mid"): 1.2,
    ("sort", "hard"): 2.2,
    ("total", "easy"): 0.6,
    ("total", "mid"): 1,
    ("total", "hard"): 1.6,
}
_LARGE_LAST_MIX: Final[dict[Cell, float]] = {
    **_LARGE_MIX,
    ("extract", "easy"): 1.4,
    ("reply", "easy"): 1.2,
    ("sort", "mid"): 0.8,
    ("sort", "hard"): 3,
    ("total", "mid"): 0.5,
}
# What was still weakest after the cool-down, once more: which order number is the one asked for.
_SMALL_POLISH_MIX: Final[dict[Cell, float]] = {
    **_SMALL_LAST_MIX,
    ("extract", "easy"): 5,
}
_LARGE_POLISH_MIX: Final[dict[Cell, float]] = {
    **_LARGE_LAST_MIX,
    ("extract", "easy"): 9,
    ("sort", "easy"): 0.8,
}

TIERS: Final = {
    "small": TierSpec(
        name="small",
        hidden=64,
        layers=3,
        heads=4,
        mlp=192,
        phases=(
            TrainingPhase(2400, _SMALL_MIX),
            TrainingPhase(1800, _SMALL_LAST_MIX, (1, 0)),
            TrainingPhase(800, _SMALL_POLISH_MIX, (0.4, 0)),
        ),
    ),
    "large": TierSpec(
        name="large",
        hidden=128,
        layers=6,
        heads=4,
        mlp=384,
        phases=(
            TrainingPhase(1500, _LARGE_MIX),
            TrainingPhase(1400, _LARGE_LAST_MIX, (1, 0)),
            TrainingPhase(700, _LARGE_POLISH_MIX, (0.7, 0)),
        ),
    ),
}
