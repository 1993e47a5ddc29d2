"""Measures the step times of a worker from outside: sends batches directly to Triton and times their reports.

- Rows that decode: the time between reports, over the steps between them.
- A prompt beside rows that decode: the time of the step that brings its first token.
- A prompt alone: the time from sending it until its first token, less what the ways take.
- What the ways take: the same for a prompt of a few tokens, less a step.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Final

from bench.support.triton_direct import DirectWorker, row
from simulator.cost import CostFit, StepSample, fit
from sluice.internal.v1 import worker_pb2

ROWS: Final = (1, 2, 4, 8, 16, 32)
PROMPTS: Final = (16, 64, 192, 400)
ANSWER_TOKENS: Final = 48
WINDOW_STEPS: Final = 8
SHORT_PROMPT: Final = 4
REPEATS: Final = 3

Rows = list[worker_pb2.BatchedTask]


@dataclass(frozen=True)
class Measured:
    """What a simulation of the worker needs; ``send_s`` is one way between batcher and worker."""

    fit: CostFit
    samples: list[StepSample]
    send_s: float


@dataclass(frozen=True)
class Seen:
    """A report, and how far the rows were when it came."""

    at: float
    report: worker_pb2.StepReport
    produced: int
    ended: int


class StepProbe:
    """Sends requests to one worker without other load.

    Args:
        vocabulary: tokens of prompts are drawn below it.
        slots: of the worker.
        min_tokens: whether rows name the least length of their answers, as those of `OpenLoad` do: it takes time.
    """

    def __init__(
        self, worker: DirectWorker, vocabulary: int, slots: int, *, min_tokens: bool = False
    ) -> None:
        self._worker = worker
        self._vocabulary = vocabulary
        self._slots = slots
        self._min_tokens = min_tokens
        self._chance = Random(1)

    async def measure(self) -> Measured:
        """Takes a minute or less on a CPU."""
        await self._play(self._batch(1, SHORT_PROMPT, ANSWER_TOKENS))  # warms up
        samples: list[StepSample] = []
        for count in (n for n in ROWS if n <= self._slots):
            for prompt in (PROMPTS[0], PROMPTS[2]):
                samples += await self._decode(count, prompt)
        for count in (n for n in ROWS[1:-1] if n < self._slots):
            for prompt in PROMPTS:
                samples += await self._joined(count, prompt)
        one_s = statistics.median(s.seconds for s in samples if s.decode_rows == 1)
        short = [await self._first_s(SHORT_PROMPT) for _ in range(4 * REPEATS)]
        ways_s = max(0.0, statistics.median(short) - one_s)
        for prompt in PROMPTS * REPEATS:
            seconds = await self._first_s(prompt) - ways_s
            samples.append(StepSample(prompt, 0, 0, max(seconds, one_s / 2)))
        return Measured(fit(samples), samples, ways_s / 2)

    async def _first_s(self, prompt: int) -> float:
        begun = time.perf_counter()
        await self._worker.first_token(self._batch(1, prompt, 2))
        seconds = time.perf_counter() - begun
        await self._worker.finish()
        return seconds

    async def _decode(self, count: int, prompt: int) -> list[StepSample]:
        """Steps of ``count`` rows, some at a time."""
        seen = await self._play(self._batch(count, prompt, ANSWER_TOKENS))
        whole = [s for s in seen if s.produced >= count and not s.ended]
        samples = []
        for before, after in zip(
            whole[::WINDOW_STEPS], whole[WINDOW_STEPS::WINDOW_STEPS], strict=False
        ):
            steps = after.report.load.steps - before.report.load.steps
            context = count * prompt + (before.produced + after.produced) // 2
            samples.append(StepSample(0, count, context, (after.at - before.at) / steps))
        return samples

    async def _joined(self, count: int, prompt: int) -> list[StepSample]:
        """Steps in which a row of ``prompt`` tokens joins ``count`` others."""
        samples = []
        for _ in range(REPEATS):
            running = self._batch(count, PROMPTS[0], ANSWER_TOKENS)
            joining = self._batch(1, prompt, 2)
            name = joining[0].task.request_id
            seen = await self._play(running, joining)
            for before, after in pairwise(seen):
                if after.ended or after.report.load.steps != before.report.load.steps + 1:
                    continue
                if any(f.request_id == name and f.start_index == 0 for f in after.report.frames):
                    context = count * PROMPTS[0] + before.produced
                    samples.append(StepSample(prompt, count, context, after.at - before.at))
        return [_middle(samples)] if samples else []

    async def _play(self, batch: Rows, later: Rows | None = None) -> list[Seen]:
        """Sends ``batch``, and ``later`` when it runs; everything that is seen until all rows have ended."""
        seen: list[Seen] = []
        runs = asyncio.Event()

        async def read() -> None:
            produced, ended, total = 0, 0, len(batch) + len(later or ())
            while ended < total:
                report = await self._worker.report()
                produced += sum(len(frame.token_ids) for frame in report.frames)
                ended += sum(frame.HasField("final") for frame in report.frames)
                seen.append(Seen(time.perf_counter(), report, produced, ended))
                if produced > 4 * len(batch):
                    runs.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            await self._worker.send(batch)
            if later is not None:
                await runs.wait()
                await self._worker.send(later)
        return seen

    def _batch(self, count: int, prompt: int, answer: int) -> Rows:
        prompts = [
            [self._chance.randrange(6, self._vocabulary) for _ in range(prompt)]
            for _ in range(count)
        ]
        return [row(one, answer, answer if self._min_tokens else 0) for one in prompts]


def _middle(samples: list[StepSample]) -> StepSample:
    """Of single steps the one in the middle: how long a report took differs more than a step."""
    return sorted(samples, key=lambda sample: sample.seconds)[len(samples) // 2]
