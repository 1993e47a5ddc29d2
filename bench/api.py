"""The HTTP API beside gRPC, and beside other gateways.

    python -m bench.api [--json] [--runs N] [PART ...]

`http_vs_grpc`  one-token answers, streamed, `MANY` callers; ours: over HTTP (/v1/chat/completions, a connection a
                caller); peer: over gRPC (Generate), at the same gateway, alternating. requests/s, client on the same
                machine. `also` has the CPU time of the gateway's process for a request of each side, milliseconds.
                Mesh, prompt and counts are those of bench/support/request_cost.py.
`http_vs_litellm`  see bench/support/beside_litellm.py.
`http_vs_smg`      see bench/support/beside_smg.py.
"""

import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.beside_litellm import http_vs_litellm
from bench.support.beside_smg import http_vs_smg
from bench.support.harness import Figure, Part, check_runs, machine, options_of, run_parts
from bench.support.request_cost import (
    MANY,
    REQUESTS,
    SLOTS,
    echo_mesh,
    interleaved,
    medians,
)
from sluice.startup import LOOPBACK


async def http_vs_grpc(runs: int) -> list[Figure]:
    """See above."""
    check_runs(runs)
    async with echo_mesh(http=f"{LOOPBACK}:0") as http:
        over_http, over_grpc = await interleaved(http, replace(http, http=None), MANY, runs)
    ours, peer = (
        statistics.median(run.requests_per_s for run in side) for side in (over_http, over_grpc)
    )
    also = {
        "http_gateway_cpu_ms": medians(over_http)["gateway"],
        "grpc_gateway_cpu_ms": medians(over_grpc)["gateway"],
    }
    note = f"one-token streams, {MANY} callers; peer: gRPC at the same gateway"
    settings = {"callers": MANY, "slots": SLOTS, "requests": REQUESTS[MANY]}
    name = "http_vs_grpc"
    return [
        Figure(name, ours, peer, ours / peer, "requests/s", runs, machine(), note, settings, also)
    ]


PARTS: Final[Mapping[str, Part]] = {
    "http_vs_grpc": lambda given: http_vs_grpc(given.runs),
    "http_vs_litellm": lambda given: http_vs_litellm(given.runs),
    "http_vs_smg": lambda given: http_vs_smg(given.runs),
}


def main() -> None:
    uvloop.run(run_parts(options_of(__doc__), PARTS))


if __name__ == "__main__":
    main()
