"""The task generator: seeded examples of every cell, split so that train and held-out never meet.

The split is a property of the task, not of the seed: the hash of an example's content decides
which side it lies on, so no seed can make a training run see a held-out task.
"""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Final, Literal
from zlib import crc32

from model_workers.tiers.example import CELLS, Cell, Example
from model_workers.tiers.numbers import sort_example, total_example
from model_workers.tiers.tickets import classify_example, extract_example, reply_example

Split = Literal["train", "heldout"]
_HELDOUT_ONE_IN: Final = 16


def split_of(content: str) -> Split:
    """The side of the split a task's content lies on."""
    return "heldout" if crc32(content.encode()) % _HELDOUT_ONE_IN == 0 else "train"


def stream(seed: int, mix: Mapping[Cell, float], split: Split = "train") -> Iterator[Example]:
    """Examples without end; `mix` weighs the cells."""
    rng = Random(f"{split} {seed}")
    cells, weights = list(mix), list(mix.values())
    while True:
        cell = rng.choices(cells, weights)[0]
        yield _draw(rng, cell, split)


def generate(seed: int, n: int, cell: Cell, split: Split = "train") -> list[Example]:
    """`n` examples of one cell."""
    rng = Random(f"{split} {seed} {cell}")
    return [_draw(rng, cell, split) for _ in range(n)]


def heldout(n_per_cell: int, seed: int) -> list[Example]:
    """`n_per_cell` held-out examples of every cell, cell after cell."""
    return [e for cell in CELLS for e in generate(seed, n_per_cell, cell, "heldout")]


def _draw(rng: Random, cell: Cell, split: Split) -> Example:
    while True:
        example = _make(rng, cell)
        if split_of(example.content) == split:
            return example


def _make(rng: Random, cell: Cell) -> Example:
    kind, level = cell
    match kind:
        case "classify":
            return classify_example(rng)
        case "extract":
            return extract_example(rng)
        case "reply":
            return reply_example(rng)
        case "sort":
            return sort_example(rng, level)
        case "total":
            return total_example(rng, level)
