"""Offline jobs: throughput beside the engine alone, and interactive callers beside a job. What attacks and kills
jobs is scripts/robustness jobs.

    python -m bench.jobs [--json] [--runs N] [--items N] [PART ...]

Without a PART: all of them. A job's time is from its creation to its end by the clock of
the service; the upload is before. Every answer of `throughput` and `interactive` has exactly `ANSWER_TOKENS` tokens,
greedy.

`throughput`  `jobs_vs_engine_throughput_29m`, `jobs_vs_engine_throughput_large`: tokens/s of answers of a job of
              --items items (1,000) through a mesh with one worker; peer: the worker's engine in a process of its own,
              same weights, type, threads, slots and tokens, given all items at once, sorted by length. Prompts are new
              in every round. Both sides may use 2 cores; the engine has one thread on both.
`interactive` `jobs_interactive_pQQ`: milliseconds to the first token of interactive callers beside a running job, small
              tier, arrivals as in `interactive_beside_bulk` (bench/mesh.py); peer: without the job.
              `jobs_beside_interactive`: items/s of the job beside them; peer: alone.
"""

import argparse
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import MIN_RUNS, Figure, emit, run_count
from bench.support.job_speed import interactive, throughput

Part = Callable[[argparse.Namespace], Awaitable[list[Figure]]]

PARTS: Final[Mapping[str, Part]] = {
    "throughput": lambda given: throughput(given.runs, given.items or 1000),
    "interactive": lambda given: interactive(given.runs),
}


async def main(options: argparse.Namespace) -> None:
    """Prints the figures of each part as soon as they are there."""
    for name in options.part or PARTS:
        emit(await PARTS[name](options), options.json)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS, help="rounds of both sides")
    parser.add_argument("--items", type=int, help="of the job")
    parser.add_argument("part", nargs="*", metavar="PART", choices=[*PARTS, []])
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main(parse()))
