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

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import MIN_RUNS, Figure, Run, compare, emit, run_count
from sluice import settings as config
from sluice.settings.routing import RoutingSettings
from sluice.v1 import inference_pb2, inference_pb2_grpc
from supervisor.mesh import running_mesh

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
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "support" / "otlp_sink.py"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    grpc_port, http_port = (await asyncio.wait_for(process.stdout.readline(), 30)).split()
    try:
        yield (
            f"http://127.0.0.1:{int(grpc_port)}",
            f"http://127.0.0.1:{int(http_port)}/v1/traces",
        )
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 10)


@asynccontextmanager
async def mesh(endpoints: tuple[str, str] | None = None) -> AsyncIterator["Stub"]:
    """A mesh that sends its spans to ``endpoints``."""
    settings = config.Settings(
        models=(
            config.ModelSettings(name=LARGE, tier="large", path="builtin:large", slots=CALLERS),
            config.ModelSettings(
                name=ECHO, tier="small", path="builtin:small", engine="echo", slots=CALLERS
            ),
        ),
        routing=RoutingSettings(default=LARGE),
        gateway=config.GatewaySettings(address="127.0.0.1:0"),
        telemetry=config.TelemetrySettings(otlp_http_endpoint=endpoints and endpoints[1]),
    )
    environment = {"OTEL_METRICS_EXPORTER": "none"}
    if endpoints is not None:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoints[0]
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder,
        variables(environment),
    ):
        async with (
            running_mesh(settings, state_dir=Path(folder)) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            yield inference_pb2_grpc.InferenceServiceStub(channel)


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that processes started inside the block inherit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run")
    options = parser.parse_args()
    emit(uvloop.run(telemetry_cost(options.runs, options.seconds)), options.json)


if __name__ == "__main__":
    main()
