"""Our engine on a saved model, without the mesh around it."""

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.support.llama_model import prompts as random_prompts
from bench.support.sides import Prompts, timed
from model_workers.engine.checkpoint import limit_threads, load_engine
from model_workers.engine.protocol import Sampling, SequenceSpec
from sluice.settings import ModelSettings


class OurEngine:
    """The engine as a worker has it. ``options`` are fields of its settings."""

    def __init__(
        self,
        folder: Path,
        *,
        vocab: int,
        device: str,
        dtype: str,
        threads: int,
        **options: Any,
    ) -> None:
        limit_threads(threads)
        settings = ModelSettings(
            name="bench",
            path=str(folder),
            device=device,
            dtype="float32" if dtype == "float32" else "bfloat16",
            threads=threads,
            **options,
        ).model_copy(update={"max_waiting_rows": 65_536})
        self._engine = load_engine(settings)
        self._vocab = vocab
        self._names = count()
        told = [f"{name}={value}" for name, value in options.items()]
        self.about = ", ".join(["our engine", *told])

    def run(self, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds and answers."""
        return timed(self._generate, prompts, new_tokens)

    def answer_s(self, prompts: Prompts, tokens: Sequence[int]) -> float:
        """Seconds until all rows, which come at once, have so many tokens each."""
        start = time.perf_counter()
        self._add(prompts, tokens)
        while self._engine.has_sequences():
            self._engine.step(0.0)
        return time.perf_counter() - start

    def decode_ms(self, rows: int, context_tokens: int, steps: int) -> tuple[float, int]:
        """The median of the times of ``steps`` steps in which ``rows`` rows decode, milliseconds; and the tokens that
        they have all together."""
        names = self._decoding(rows, context_tokens)
        took_ms = [self._step_ms() for _ in range(steps)]
        load = self._engine.load()
        assert load.running == rows, "rows ended before their time was taken"
        self._drop(names)
        return median(took_ms), load.running_tokens

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        """The time of a step that computes ``tokens`` of a prompt behind ``context_tokens`` that are cached."""
        (prompt,) = self._prompts(1, context_tokens + tokens)
        if context_tokens:
            self._generate([prompt[: context_tokens + 1]], 1)
        self._add([prompt], [1])
        took_ms = 0.0
        while self._engine.has_sequences():
            took_ms += self._step_ms()
        return took_ms

    def profile(self, rows: int, context_tokens: int) -> str:
        """Where the time of one decoding step goes, as a table."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        names = self._decoding(rows, context_tokens)
        with torch.profiler.profile(activities=activities) as profiler:
            self._engine.step(0.0)
        self._drop(names)
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        return str(profiler.key_averages().table(sort_by=key, row_limit=25))

    def _generate(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        answers: dict[str, list[int]] = {
            name: [] for name in self._add(prompts, [new_tokens] * len(prompts))
        }
        while self._engine.has_sequences():
            for step in self._engine.step(0.0):
                answers[step.request_id] += step.token_ids
        return list(answers.values())

    def _add(self, prompts: Prompts, tokens: Sequence[int]) -> list[str]:
        names = [str(next(self._names)) for _ in prompts]
        for name, prompt, length in zip(names, prompts, tokens, strict=True):
            spec = SequenceSpec(name, "bench", 0, tuple(prompt), (), Sampling(max_tokens=length))
            self._engine.add(spec, 0.0)
        return names

    def _decoding(self, rows: int, context_tokens: int) -> list[str]:
        """Rows of that length, behind their prompts and a few steps more."""
        names = self._add(self._prompts(rows, context_tokens), [1 << 20] * rows)
        while self._engine.load().waiting_tokens:
            self._engine.step(0.0)
        for _ in range(3):
            self._engine.step(0.0)
        return names

    def _drop(self, names: Sequence[str]) -> None:
        self._engine.cancel(names)
        self._engine.step(0.0)
        assert not self._engine.has_sequences()

    def _prompts(self, rows: int, length: int) -> Sequence[list[int]]:
        """Of one length, none twice."""
        return random_prompts(next(self._names), rows, length, length, self._vocab)

    def _step_ms(self) -> float:
        start = time.perf_counter()
        self._engine.step(0.0)
        return (time.perf_counter() - start) * 1000


def copy_bandwidth(gigabytes: float) -> float:
    """Bytes per second that the CUDA device reads and writes when it copies."""
    size = int(gigabytes * 1e9)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        target.copy_(source)
    torch.cuda.synchronize()
    took_s = time.perf_counter() - start
    del source, target
    torch.cuda.empty_cache()
    return 2 * size * 20 / took_s
