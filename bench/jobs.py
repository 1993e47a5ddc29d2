"""Offline jobs: throughput beside the engine alone, and interactive callers beside a job. What attacks and kills
jobs is scripts/robustness jobs.

    python -m bench.jobs [--json] [--runs N] [--items N] [PART ...]

Without a PART: all of them. A job's time is from its creation to its end by the clock of the service; the upload is
before. Prompts are held-out tasks with a number before each; answers have exactly 8, 16 and 24 tokens in turn, greedy.

`throughput`  `jobs_vs_engine_throughput_29m`, `jobs_vs_engine_throughput_large`: tokens/s of answers of a job of
              --items items (1,000) through a mesh with one worker; peer: the worker's engine in a process of its own,
              same weights, type (float32), threads, slots and tokens, given all items at once, sorted by length.
              Prompts are new in every round. Both sides may use 2 cores; the engine has one thread on both.
`interactive` `jobs_interactive_pQQ`: milliseconds to the first token of interactive callers beside a running job, small
              tier, calls as in `interactive_beside_bulk` (bench/tails.py); peer: without the job.
              `jobs_beside_interactive`: items/s of the job beside them; peer: alone.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Part, options_of, run_parts
from bench.support.job_speed import interactive, throughput

PARTS: Final[Mapping[str, Part]] = {
    "throughput": lambda given: throughput(given.runs, given.items or 1000),
    "interactive": lambda given: interactive(given.runs),
}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--items", type=int, help="of the job")
    uvloop.run(run_parts(parser, PARTS))


if __name__ == "__main__":
    main()
