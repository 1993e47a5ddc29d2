"""Offline jobs: throughput beside the engine alone, memory, cost and first item by size, identical prompts, and
interactive callers beside a job. What attacks and kills jobs is scripts/robustness jobs.

    python -m bench.jobs [--json] [--runs N] [--items N] [PART ...]

Without a PART: all of them. A job's time is from its creation to its end by the clock of
the service; the upload is before. Every answer of `throughput` and `interactive` has exactly `ANSWER_TOKENS` tokens,
greedy.

`throughput`  `jobs_vs_engine_throughput_29m`, `jobs_vs_engine_throughput_large`: tokens/s of answers of a job of
              --items items (1,000) through a mesh with one worker; peer: the worker's engine in a process of its own,
              same weights, type, threads, slots and tokens, given all items at once, sorted by length. Prompts are new
              in every round. Both sides may use 2 cores; the engine has one thread on both.
`growth`      jobs of 1,000 and of --items items (200,000) one after the other in a mesh with the echo engine, after a
              job of 1,000 that warms up. `jobs_memory_growth`: resident memory of gateway, batcher, worker and jobs
              together, the most of the last tenth of the large job; peer: the most of the small one. `also` has
              the processes, and NATS, whose memory is not ours. `jobs_nats_disk_bytes`, `jobs_nats_memory_bytes`: bytes
              an item of the large job, of all NATS keeps, from before its upload to its end. `jobs_cost_growth`:
              milliseconds of processor time of all processes an item; peer: of the small job.
`first-item`  `jobs_first_item_s`: from the call that creates a job of --items items (200,000) to its first
              result at a client that follows its results; peer: with 1,000 items. Of twenty lines one is a bad
              one, and two are duplicates.
`dedupe`      `jobs_dedupe_saving`: of the tokens of a job without identical prompts, the share that a job of which 30 %
              are identical does not compute; peer: 0.3. Echo engine.
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
from bench.support.job_growth import dedupe, first_item, growth
from bench.support.job_speed import interactive, throughput

Part = Callable[[argparse.Namespace], Awaitable[list[Figure]]]

PARTS: Final[Mapping[str, Part]] = {
    "throughput": lambda given: throughput(given.runs, given.items or 1000),
    "growth": lambda given: growth(given.items or 200_000),
    "first-item": lambda given: first_item(given.runs, given.items or 200_000),
    "dedupe": lambda given: dedupe(given.items or 2000),
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
    parser.add_argument("--items", type=int, help="of the job, or of the large one")
    parser.add_argument("part", nargs="*", metavar="PART", choices=[*PARTS, []])
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main(parse()))
