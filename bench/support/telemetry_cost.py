"""What tracing and metrics cost a mesh, in throughput: two meshes side by side, one with them and one without.

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
- `metrics_vs_none`: one-token answers as above, no traces. Ours has a page for Prometheus in gateway, batcher and jobs,
  each read every `SCRAPE_S`; the peer has none.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from bench.support.harness import Figure, Run, compare
from sluice import settings as config
from sluice.settings.routing import RoutingSettings
from sluice.v1 import inference_pb2, inference_pb2_grpc
from supervisor.mesh import Mesh, running_mesh

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

PROMPT: Final = "What is the total of 314, 272, 973, 323, 486?"
LARGE, ECHO = "large", "echo"
CALLERS: Final = 32
ANSWER_TOKENS: Final = 64
SCRAPE_S: Final = 1.0
CALL_S: Final = 120.0
_NONE: Final = "127.0.0.1:0"


async def telemetry_cost(runs: int, seconds: float) -> list[Figure]:
    """The figures above."""
    said = {"callers": CALLERS, "answer_tokens": ANSWER_TOKENS, "seconds": seconds}
    async with mesh() as plain:
        async with receiver() as endpoints, mesh(endpoints) as traced:
            figures = [
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
        async with mesh(pages=True) as measured:
            figures.append(
                await compare(
                    "metrics_vs_none",
                    load(measured, ECHO, 1, seconds),
                    load(plain, ECHO, 1, seconds),
                    unit="requests/s",
                    higher_is_better=True,
                    note=f"echo, one-token answers, {CALLERS} callers, pages read every {SCRAPE_S:g} s; peer: no page",
                    runs=runs,
                    settings=said,
                )
            )
    return figures


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
        str(Path(__file__).with_name("otlp_sink.py")),
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
async def mesh(
    endpoints: tuple[str, str] | None = None, *, pages: bool = False
) -> AsyncIterator["Stub"]:
    """A mesh that sends its spans to ``endpoints``, or has ``pages`` of metrics that are read."""
    page = _NONE if pages else None
    settings = config.Settings(
        models=(
            config.ModelSettings(name=LARGE, tier="large", path="builtin:large", slots=CALLERS),
            config.ModelSettings(
                name=ECHO, tier="small", path="builtin:small", engine="echo", slots=CALLERS
            ),
        ),
        routing=RoutingSettings(default=LARGE),
        gateway=config.GatewaySettings(address="127.0.0.1:0"),
        telemetry=config.TelemetrySettings(
            otlp_http_endpoint=endpoints and endpoints[1],
            prometheus=config.PrometheusSettings(gateway=page, batcher=page, jobs=page),
        ),
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
            scraped(running),
        ):
            yield inference_pb2_grpc.InferenceServiceStub(channel)


@asynccontextmanager
async def scraped(running: Mesh) -> AsyncIterator[None]:
    """Reads the pages of a mesh inside the block."""
    asked = running.settings.telemetry.prometheus
    pages = [page for page in (asked.gateway, asked.batcher, asked.jobs) if page is not None]

    async def reading() -> None:
        while True:
            for page in pages:
                await asyncio.to_thread(read, f"http://{page}/metrics")
            await asyncio.sleep(SCRAPE_S)

    task = asyncio.create_task(reading()) if pages else None
    yield
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task  # a page that could not be read ends the benchmark here


def read(url: str) -> None:
    """Reads a page of metrics."""
    with urllib.request.urlopen(url, timeout=10) as response:
        assert response.read()


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
