"""What tracing costs a mesh: two meshes side by side, one with it and one without.

    python bench/telemetry.py [--json] [--runs N]

- `traced_vs_untraced_one_token`: requests/s, one-token answers of an echo model, `LOAD.callers` callers in closed loop
  (bench/support/load.py).
- `traced_vs_untraced_29m`: the same callers, answers of 16 to 96 tokens of a Llama of 29 M parameters.

Ours samples every request (OTEL_TRACES_SAMPLER is not set) and sends all spans, Triton's too,
to a receiver that reads and forgets them (bench/support/otlp_sink.py, a process on the same machine); the peer has no
endpoint. Neither sends metrics. Everything else is as shipped; the mesh that is not measured is idle.
"""

import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, compare, emit, options_of
from bench.support.llama_model import write_served_model
from bench.support.load import Load, Server, closed_loop
from bench.support.meshes import echo, environment, mesh_of, mesh_settings, ports_of, program
from sluice import settings as config

LOAD: Final = Load(32, 3000)
ANSWERS: Final = Load(32, 192, (16, 32, 64, 96))


async def telemetry_cost(runs: int) -> list[Figure]:
    """Measure the figures above."""
    with tempfile.TemporaryDirectory(prefix="sluice-model-") as folder:
        path = str(write_served_model(Path(folder)))
        model = config.ModelSettings(name="29m", tier="large", path=path)
        return [
            await _cost("traced_vs_untraced_one_token", echo(LOAD.callers), LOAD, runs),
            await _cost("traced_vs_untraced_29m", model, ANSWERS, runs),
        ]


async def _cost(name: str, model: config.ModelSettings, load: Load, runs: int) -> Figure:
    async with mesh(model) as plain, receiver() as endpoints, mesh(model, endpoints) as traced:

        async def rate(server: Server) -> float:
            asked = load.of(server.model, 0)
            return load.answers / await closed_loop(load.callers, asked, server.ask)

        return await compare(
            name,
            lambda: rate(traced),
            lambda: rate(plain),
            unit="requests/s",
            higher_is_better=True,
            note=f"{model.name}, {load.callers} callers, every request traced; peer: no receiver",
            runs=runs,
            settings={"callers": load.callers, "answers": load.answers, "tokens": load.tokens},
        )


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[str, str]]:
    """Endpoints of a receiver in a process of its own: gRPC, and HTTP with its path."""
    async with program("otlp_sink") as process:
        grpc_port, http_port = await ports_of(process)
        yield f"http://127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}/v1/traces"


@asynccontextmanager
async def mesh(
    model: config.ModelSettings, endpoints: tuple[str, str] | None = None
) -> AsyncIterator[Server]:
    """Run a mesh that serves ``model`` and sends its spans to ``endpoints``."""
    settings = mesh_settings(
        model,
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
            yield Server(channel, settings.models[0].name, {})


def main() -> None:
    """Prints the figure."""
    options = options_of(__doc__).parse_args()
    emit(uvloop.run(telemetry_cost(options.runs)), options.json)


if __name__ == "__main__":
    main()
