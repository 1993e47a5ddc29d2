"""Many requests through an engine with a small cache: does anything leak, does it grow slower?

    python -m tests.model_workers.engine.soak --requests 10000

The requests come in ten tenths of the very same work. They share prefixes, have three ranks and give way to each other;
some are cancelled, some run into their deadline, some are replaced by a higher attempt. Exit code 1 when blocks,
sequences or memory are lost, or when the last tenth was more than 3 % slower than the first (CPU time, so that other
processes do not count).
"""

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from model_workers.engine.forward import load_model
from model_workers.engine.paged_engine import PagedEngine
from model_workers.engine.protocol import Sampling, SequenceSpec
from model_workers.engine.sampling.sampler import Sampler
from model_workers.engine.sequences import Sequence
from tests.support.sequences import sequence_spec
from tests.support.tiny_models import VOCABULARY, save_model

TENTHS = 10
SLOTS = 8
CACHE_BLOCKS = 34
BLOCK_TOKENS = 8
GROWTH_MAX_MB = 8.0
SLOWDOWN_MAX = 0.03


@dataclass
class Findings:
    """What a soak found.

    Attributes:
        tokens_per_s: of each tenth, by CPU time.
        growth_mb: of the resident memory since the end of the first tenth.
        lost_blocks, lost_rows: that nobody holds any more, and that are still there.
    """

    tokens_per_s: list[float]
    growth_mb: float
    lost_blocks: int
    lost_rows: int
    preemptions: int

    @property
    def last_to_first(self) -> float:
        """Throughput of the last tenth by that of the first."""
        return self.tokens_per_s[-1] / self.tokens_per_s[0]

    @property
    def leaks(self) -> bool:
        """Whether anything is lost."""
        return bool(self.lost_blocks or self.lost_rows) or self.growth_mb > GROWTH_MAX_MB


def soak(requests: int) -> Findings:
    """Runs ``requests`` requests."""
    rows_before = _row_objects()  # of other engines in this process
    with tempfile.TemporaryDirectory() as folder:
        engine = small_engine(save_model(Path(folder)))
    part = requests // TENTHS
    _tenth(engine, part, "warm-up")
    speeds = []
    memory: list[int] = []
    for tenth in range(TENTHS):
        speeds.append(_tenth(engine, part, f"t{tenth}"))
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)
    load = engine.load()
    sequences = _row_objects() - rows_before
    return Findings(
        speeds,
        (memory[-1] - memory[0]) / 1e6,
        load.cache_blocks - load.free_blocks,
        sequences,
        load.preemptions,
    )


def _row_objects() -> int:
    gc.collect()
    return sum(type(thing) is Sequence for thing in gc.get_objects())


def small_engine(folder: Path) -> PagedEngine:
    """Eight slots over a cache that a few sequences fill."""
    model = load_model(str(folder), device="cpu").paged(CACHE_BLOCKS, BLOCK_TOKENS)
    return PagedEngine(model, Sampler(), slots=SLOTS, max_waiting=64, prefill_tokens=64)


def _tenth(engine: PagedEngine, requests: int, name: str) -> float:
    """Tokens per second of CPU time."""
    numbers = random.Random(1)
    sequences = _sequences(numbers, requests, name)
    began, tokens, now, waiting = time.process_time(), 0, 0.0, next(sequences, None)
    while waiting is not None or engine.has_sequences():
        while waiting is not None and engine.load().waiting < 2 * SLOTS:
            deadline = now + numbers.randint(20, 60) if numbers.random() < 0.5 else None
            engine.add(replace(waiting, deadline=deadline), now)
            if numbers.random() < 0.03:
                engine.cancel([waiting.request_id])
            waiting = next(sequences, None)
        tokens += sum(len(step.token_ids) for step in engine.step(now))
        now += 1.0
    return tokens / (time.process_time() - began)


def _sequences(numbers: random.Random, requests: int, name: str) -> Iterator[SequenceSpec]:
    shared = [[numbers.randrange(VOCABULARY) for _ in range(64)] for _ in range(4)]
    for i in range(requests):
        prompt = numbers.choice(shared)[: numbers.randrange(64)]
        prompt += [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, 20))]
        sampling = Sampling(numbers.randint(1, 24), temperature=numbers.choice((0.0, 1.0)), seed=i)
        request_id, rank = f"{name}-{i}", numbers.randrange(3)
        yield sequence_spec(request_id, prompt, sampling, rank=rank)
        if numbers.random() < 0.03:
            yield sequence_spec(request_id, prompt, sampling, rank=rank, attempt=1)


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    found = soak(parser.parse_args().requests)
    speeds = ", ".join(f"{speed:,.0f}" for speed in found.tokens_per_s)
    print(f"tokens/s of each tenth: {speeds}")
    print(f"last tenth to first: {found.last_to_first:.3f}")
    print(f"memory: {found.growth_mb:+.1f} MB since the first tenth")
    print(f"lost: {found.lost_blocks} blocks, {found.lost_rows} sequences")
    print(f"preemptions: {found.preemptions}")
    return int(found.leaks or found.last_to_first < 1 - SLOWDOWN_MAX)


if __name__ == "__main__":
    sys.exit(main())
