"""What tracing costs a mesh, in throughput: two meshes side by side, one with it and one without.

    python bench/telemetry.py [--json] [--runs N] [--seconds S]

Both have the shipped large tier and an echo model, `CALLERS` slots each, one gateway, everything else as shipped. Runs
of `seconds` alternate after one warm-up of each; the mesh that is not measured is idle. Callers use the plain stubs, on
the same machine, and each sends its next request when the last has ended; what is counted are the tokens that arrived,
divided by the time. Sampling is greedy.

- `traced_vs_untraced`: the large tier, `CALLERS` callers, answers of `ANSWER_TOKENS` tokens at most; tokens/s. Ours
  samples every request (OTEL_TRACES_SAMPLER is not set) and sends all spans, Triton's too, to a receiver that reads
  and forgets them (`bench/support/otlp_sink.py`, a process on the same machine); the peer has no endpoint. Neither
  sends metrics.
- `traced_vs_untraced_one_token`: the same with answers of one token from the echo model, so that the work of the model
  is next to nothing; requests/s.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, Run, compare, emit, options_of
from bench.support.meshes import echo, environment, mesh_of, mesh_settings, ports_of, program
from sluice import settings as config
from sluice.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

PROMPT: Final = "What is the total of 314, 272, 973, 323, 486?"
LARGE, ECHO = "large", "echo"
CALLERS: Final = 32
ANSWER_TOKENS: Final = 64
CALL_S: Final = 120.0


async def telemetry_cost(runs: int, seconds: float) -> list[Figure]:
    """The figures above."""
    said = {"callers": CALLERS, "answer_tokens": ANSWER_TOKENS, "seconds": seconds}
    async with mesh() as plain, receiver() as endpoints, mesh(endpoints) as traced:
        return [
            await compare(
                "traced_vs_untraced",
                load(traced, LARGE, ANSWER_TOKENS, seconds),
                load(plain, LARGE, ANSWER_TOKENS, seconds),
                unit="tokens/s",
                higher_is_better=True,
                note=f"large tier, {CALLERS} callers, every request traced; peer: no receiver",
                runs=runs,
                settings=said,
            ),
            await compare(
                "traced_vs_untraced_one_token",
                load(traced, ECHO, 1, seconds),
                load(plain, ECHO, 1, seconds),
                unit="requests/s",
                higher_is_better=True,
                note=f"echo, {CALLERS} callers, every request traced; peer: no receiver",
                runs=runs,
                settings=said,
            ),
        ]


def load(stub: "Stub", model: str, tokens: int, seconds: float) -> Run:
    """Tokens/s of all callers."""
    request = inference_pb2.GenerateRequest(
        prompt=PROMPT, model=model, sampling=inference_pb2.SamplingParams(max_tokens=tokens)
    )

    async def measured() -> float:
        begun, came = time.perf_counter(), 0

        async def caller() -> None:
            nonlocal came
            while time.perf_counter() - begun < seconds:
                async for response in stub.Generate(request, timeout=CALL_S):
                    came += len(response.delta.token_ids)

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return came / (time.perf_counter() - begun)

    return measured


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[str, str]]:
    """Endpoints of a receiver in a process of its own: gRPC, and HTTP with its path."""
    async with program("otlp_sink") as process:
        grpc_port, http_port = await ports_of(process)
        yield f"http://127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}/v1/traces"


@asynccontextmanager
async def mesh(endpoints: tuple[str, str] | None = None) -> AsyncIterator["Stub"]:
    """A mesh that sends its spans to ``endpoints``."""
    settings = mesh_settings(
        config.ModelSettings(name=LARGE, tier="large", path="builtin:large", slots=CALLERS),
        echo(CALLERS),
        telemetry=config.TelemetrySettings(otlp_http_endpoint=endpoints and endpoints[1]),
    )
    variables = {"OTEL_METRICS_EXPORTER": "none"}
    if endpoints is not None:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoints[0]
    with environment(variables):
        async with (
            mesh_of(settings) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            yield inference_pb2_grpc.InferenceServiceStub(channel)


def main() -> None:
    """Prints the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run")
    options = parser.parse_args()
    emit(uvloop.run(telemetry_cost(options.runs, options.seconds)), options.json)


if __name__ == "__main__":
    main()
