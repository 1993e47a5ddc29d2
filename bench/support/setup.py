"""The model of a benchmark on disk, the sides that run it, the work they do, and what a step of it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.support.engine_side import OurEngine
from bench.support.harness import machine
from bench.support.llama_model import Shape, prompts
from bench.support.sides import Side
from bench.support.transformers_sides import ContinuousBatch, StaticBatch

TRIAL_SEED: Final = 1 << 30
"""Of prompts to choose settings with; no round has it."""
CACHE_GB: Final = 18.0
"""On a GPU: all rows of a batch fit, and two sides with their weights on a card of 80 GB."""


@dataclass(frozen=True)
class Work:
    """What a side does in a run."""

    rows: int
    shortest: int
    longest: int
    new_tokens: int
    vocab: int

    def prompts(self, seed: int) -> list[list[int]]:
        return prompts(seed, self.rows, self.shortest, self.longest, self.vocab)

    def __str__(self) -> str:
        span = {self.shortest, self.longest}
        lengths = " to ".join(str(length) for length in sorted(span))
        return f"rows {self.rows}, prompts of {lengths} tokens, {self.new_tokens} new tokens each"


@dataclass(frozen=True)
class Setup:
    """One model, and how it is run."""

    folder: Path
    shape: Shape
    device: str
    dtype: str
    threads: int
    runs: int

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def batch(self) -> Work:
        if self.on_cuda:
            return Work(128, 512, 512, 256, self.shape.vocab)
        return Work(32, 16, 128, 64, self.shape.vocab)

    @property
    def single(self) -> Work:
        return Work(1, 64, 64, 64, self.shape.vocab)

    def engine(self, **options: Any) -> Side:
        if self.on_cuda:
            options = {"slots": 128, "prefill_tokens": 8192, "cache_gb": CACHE_GB, **options}
        return Side(OurEngine, self.folder, **self._common, vocab=self.shape.vocab, **options)

    @property
    def _common(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype, "threads": self.threads}

    def static(self, work: Work) -> Side:
        trial = work.prompts(TRIAL_SEED)
        return Side(
            StaticBatch, self.folder, **self._common, trial=trial, new_tokens=work.new_tokens
        )

    def continuous(self, work: Work) -> Side:
        return Side(
            ContinuousBatch,
            self.folder,
            **self._common,
            trial=work.prompts(TRIAL_SEED),
            new_tokens=work.new_tokens,
        )

    def llamacpp(self, work: Work) -> Side:
        """Raises ImportError where the packages of the extra "peers" are missing."""
        from bench.support.llama_gguf import write_gguf
        from bench.support.llamacpp_side import LlamaCppSide

        file = write_gguf(self.folder / "model.gguf", self.folder, self.shape, self.dtype)
        trial = work.prompts(TRIAL_SEED)
        return Side(
            LlamaCppSide, file, threads=self.threads, trial=trial, new_tokens=work.new_tokens
        )


DECODE_ROWS: Final = (1, 2, 4, 8, 16, 32)
DECODE_CONTEXTS: Final = (64, 256, 1024)
PREFILL_TOKENS: Final = (16, 64, 128, 256, 512)
PREFILL_CONTEXTS: Final = (0, 512, 1024)
STEPS: Final = 16


def costs(engine: Side, runs: int) -> list[dict[str, Any]]:
    """The JSON objects of both phases, with the points that they were fitted to."""
    decode = [
        (rows, *reversed(engine.call("decode_ms", rows, context, STEPS)))
        for rows in DECODE_ROWS
        for context in DECODE_CONTEXTS
    ]
    prefill = [
        (tokens, context, _median(engine, tokens, context, runs))
        for tokens in PREFILL_TOKENS
        for context in PREFILL_CONTEXTS
    ]
    decode_names = ("fixed_ms", "row_ms", "context_token_ms")
    prefill_names = ("fixed_ms", "token_ms", "token_and_context_token_ms")
    return [
        _line("decode", decode_names, [(1, rows, tokens, ms) for rows, tokens, ms in decode]),
        # A token looks at all before it, so attention costs as the product.
        _line(
            "prefill",
            prefill_names,
            [(1, new, new * (context + new / 2), ms) for new, context, ms in prefill],
        ),
    ]


def _median(engine: Side, tokens: int, context: int, runs: int) -> float:
    return float(np.median([engine.call("prefill_ms", tokens, context) for _ in range(runs)]))


def _line(phase: str, names: Sequence[str], points: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Least squares of the relative error: a step of 2 ms counts as much as one of 50."""
    table = np.array(points)
    inputs, took_ms = table[:, :-1], table[:, -1]
    found, *_ = np.linalg.lstsq(inputs / took_ms[:, None], np.ones(len(table)), rcond=None)
    errors = np.abs(inputs @ found / took_ms - 1)
    return {
        "figure": "engine_cost",
        "phase": phase,
        **{name: float(value) for name, value in zip(names, found, strict=True)},
        "mean_error_share": float(errors.mean()),
        "points": [[float(value) for value in point[1:]] for point in points],
        "machine": machine(),
    }
