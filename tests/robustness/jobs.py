"""Offline jobs beside the worst jobs of another tenant, and jobs whose processes are killed.

    scripts/robustness jobs [--json] [--items N] [--seconds S] [--only WHAT ...] isolation|kills

A job's time is from its creation to its end by the clock of the service; the upload is before.

`isolation`   `jobs_isolation_KIND`: seconds of a job of 3 items, from the begin of its upload until its client has
              the last result, median of 20 or more one after the other while another tenant creates 1,000 jobs with 16
              calls at a time; peer: the median of 20 in the same mesh before. `also`: the worst of both (bound: that
              beside at most 1 s above that alone), how many hostile jobs were created or refused, and the most memory
              of the process of jobs. Shipped settings; echo engine, which is far from busy. Each hostile job is the
              worst that it may be. KIND: `csv` (a line of 1 GiB, in zstd), `parquet` (100,000 rows of 900,000
              bytes in a small file), `blank` (536 million empty lines, in zstd), `webhooks` (whose receiver takes
              connections and never answers), `slow` (1,000 items, one a minute: the job holds its place), `mixed` (200
              of each). A mesh for each. --only picks one.
`kills`       `jobs_kill_PROCESS`: a job of --items items (20,000) on the small tier while a process is killed (SIGKILL)
              every 10 s for --seconds s (180): batcher, worker (one standby), gateway, NATS, jobs. ours: tokens of
              answers that the workers computed beyond those of the calm run of the same job, a share of them (bound:
              0.05). `also`: `missing` (items without exactly one result), `different` (answers that are not those
              of the calm run), `resume_max_s` (longest time from a kill to the next item that is computed and written;
              bound: 5), `kills` (how many) and the seconds that both runs took.
"""

import argparse

from bench.support.harness import emit
from tests.robustness.job_isolation import KINDS as HOSTILE_KINDS
from tests.robustness.job_isolation import isolation
from tests.robustness.job_kills import KINDS, kills


async def main(options: argparse.Namespace) -> None:
    """Prints the figures of the part."""
    if options.part == "isolation":
        emit(await isolation(tuple(options.only or HOSTILE_KINDS)), options.json)
    else:
        emit(await kills(options.only or KINDS, options.items, options.seconds), options.json)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--items", type=int, default=20_000, help="of the job that is killed")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long to kill processes")
    parser.add_argument(
        "--only",
        action="append",
        choices=(*KINDS, *HOSTILE_KINDS),
        help="of `kills`: this process; of `isolation`: this kind",
    )
    parser.add_argument("part", metavar="PART", choices=["isolation", "kills"])
