"""Fuzzing: mutated requests over gRPC and HTTP, messages between processes, credentials and files of jobs.

Everything runs in this process without sockets: a whole gateway, a batcher, the service of jobs and a worker with the
echo engine, each with a NATS in memory. An input is a finding when it raises something, is logged with a traceback,
ends a call with an error that is not typed, or takes longer than 10 s. Each finding is a JSON line with what replays
it; then comes one line a target: inputs, what became of them, seconds, and the resident memory after a tenth of the
inputs and at the end.

    scripts/robustness fuzz [--count N] [--seed S] [--targets grpc,http,...] [--block B]

An input depends on its target's state, so each target is opened anew after 1,000 inputs (a block), and --block runs
that block alone. The exit code is 1 after a finding.
"""

import argparse
import asyncio
import gc
import json
import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Final
from unittest.mock import patch

import psutil

from tests.robustness.fuzz_targets import TARGETS, Fuzzed
from tests.robustness.mutator import Mutator

BLOCK: Final = 1000
"""Inputs of a target between two openings."""
INPUT_S: Final = 10.0
"""Longest time that one input may take, seconds."""
FINDINGS_MAX: Final = 20
"""Of one target, that are printed."""
WEIGHTS: Final = {"grpc": 5, "http": 5, "frames": 4, "batcher": 4, "compiled": 0.1, "parquet": 0.02}
"""Parts of the inputs; of other targets 2. The last two have processes of their own, which take long."""


class Unhandled(logging.Handler):
    """Collects what is logged with a traceback: somebody caught what should not have been raised."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if record.exc_info:
            self.found.append("".join(traceback.format_exception(record.exc_info[1])))

    def lost(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task of asyncio has ended with an error that nobody takes."""
        error = context.get("exception")
        text = "".join(traceback.format_exception(error)) if error else ""
        self.found.append(context["message"] + text)


class Run:
    """Of one target. Attributes: outcomes, findings, and the memory of the process in bytes."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.outcomes: Counter[str] = Counter()
        self.findings = 0
        self.early_bytes = self.late_bytes = 0
        self._logged = Unhandled()

    async def blocks(self, first: int, count: int) -> None:
        """``count`` inputs from block ``first`` on."""
        asyncio.get_running_loop().set_exception_handler(self._logged.lost)
        begun = time.perf_counter()
        with _logging_to(self._logged):
            for start in range(0, count, BLOCK):
                await self._block(first + start // BLOCK, min(BLOCK, count - start))
                if start <= count / 10:
                    self.early_bytes = _resident()
        self.late_bytes, self.seconds = _resident(), time.perf_counter() - begun

    async def _block(self, block: int, count: int) -> None:
        random = Random(f"{self.seed}/{self.name}/{block}")
        async with TARGETS[self.name]() as fuzzed:
            for number in range(count):
                await self._input(fuzzed, random, f"block {block}, input {number}")
        gc.collect()  # tasks that were dropped with an error say so now
        self._look(f"block {block}, its end")

    async def _input(self, fuzzed: Fuzzed, random: Random, where: str) -> None:
        try:
            async with asyncio.timeout(INPUT_S):
                self.outcomes[await fuzzed(Mutator(random))] += 1
        except Exception:  # that is what is looked for
            self._logged.found.append(traceback.format_exc())
        self._look(where)

    def _look(self, where: str) -> None:
        for text in self._logged.found:
            self.findings += 1
            if self.findings <= FINDINGS_MAX:
                replay = f"--seed {self.seed} --targets {self.name}"
                lines = text.strip().splitlines()
                print(json.dumps({"finding": where, "replay": replay, "error": lines[-12:]}))
        self._logged.found.clear()

    @property
    def line(self) -> dict[str, Any]:
        """The result."""
        count = self.outcomes.total() + self.findings
        return {
            "target": self.name,
            "inputs": count,
            "findings": self.findings,
            "seconds": round(self.seconds, 1),
            "inputs_a_second": round(count / self.seconds),
            "rss_mib": [self.early_bytes >> 20, self.late_bytes >> 20],
            "outcomes": dict(self.outcomes.most_common(12)),
        }


@contextmanager
def _logging_to(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    before, root.handlers = root.handlers, [handler]
    try:
        yield
    finally:
        root.handlers = before


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def shares(targets: list[str], count: int) -> dict[str, int]:
    """How many of ``count`` inputs each target gets."""
    whole = sum(WEIGHTS.get(name, 2) for name in targets)
    return {name: max(1, int(count * WEIGHTS.get(name, 2) / whole)) for name in targets}


async def main(options: argparse.Namespace) -> int:
    """Fuzz one target after the other; return 1 if there are findings."""
    findings = 0
    # Nobody else answers questions for metrics.
    with (
        patch("sluice.telemetry.exchange.GATHER_S", 0.0),
        patch("sluice.telemetry.exchange.LATE_S", 0.0),
    ):
        for name, count in shares(options.targets.split(","), options.count).items():
            run = Run(name, options.seed)
            first, most = (0, count) if options.block is None else (options.block, BLOCK)
            await run.blocks(first, min(count, most))
            print(json.dumps(run.line), flush=True)
            findings += run.findings
    return int(findings > 0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs of all targets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, with commas between")
    parser.add_argument("--block", type=int, help="run this block alone")
