"""The model of a benchmark on disk, the sides that run it, and the work they do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.support.engine_side import OurEngine
from bench.support.llama_model import Shape, prompts
from bench.support.sides import Side
from bench.support.transformers_sides import ContinuousBatch, StaticBatch

TRIAL_SEED: Final = 1 << 30
"""Of prompts to choose settings with; no round has it."""


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
            options = {"slots": 128, "prefill_tokens": 8192, "cache_gb": 40.0, **options}
        return Side(OurEngine, self.folder, **self._common, vocab=self.shape.vocab, **options)

    @property
    def _common(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype, "threads": self.threads}

    def static(self, work: Work) -> Side:
        trial = work.prompts(TRIAL_SEED)
        return Side(
            StaticBatch, self.folder, **self._common, trial=trial, new_tokens=work.new_tokens
        )

    def continuous(self, work: Work, *, tuned: bool) -> Side:
        return Side(
            ContinuousBatch,
            self.folder,
            **self._common,
            trial=work.prompts(TRIAL_SEED),
            new_tokens=work.new_tokens,
            tuned=tuned,
        )

    def llamacpp(self, work: Work) -> Side:
        """Raises ImportError where the packages of the extra "peers" are missing."""
        from bench.support.llama_gguf import write_gguf
        from bench.support.llamacpp_side import LlamaCppSide

        file = write_gguf(self.folder / "model.gguf", self.folder, self.shape)
        trial = work.prompts(TRIAL_SEED)
        return Side(
            LlamaCppSide, file, threads=self.threads, trial=trial, new_tokens=work.new_tokens
        )
