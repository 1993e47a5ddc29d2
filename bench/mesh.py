"""Overhead of the mesh: tokens/s and time to first token through the mesh and directly with Triton; with the `echo`
engine, tokens/s beside a bare grpc.aio stream; and the CPU use of an idle mesh.

    python bench/mesh.py [--json] [--runs N] [FIGURES...]

FIGURES: `overhead` (the above, the default); `request_cost`: CPU of a one-token request, `gateway_cpu_vs_bare_grpc`,
`mesh_requests_per_s`, `mesh_cpu_lone_ms` and `cache_hit_vs_computed`, and `secured_vs_open` beside it, what identities
and limits cost, and `tls_vs_plain`, what encryption costs, all defined in `bench/support/request_cost.py`; with
the shipped settings on the small tier `interactive_beside_bulk` and `openloop_ttft`, defined in
`bench/support/open_loop.py`.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, compare, emit, machine, options_of
from bench.support.llama_model import write_served_model
from bench.support.meshes import echo, mesh_of, mesh_settings
from bench.support.open_loop import MODEL as SMALL
from bench.support.open_loop import interactive_beside_bulk, openloop_ttft, percentiles
from bench.support.request_cost import bare_server, request_cost, secured_vs_open, tls_vs_plain
from bench.support.triton_direct import DirectWorker, rows
from gateway.config.models import load_catalog
from sluice import settings as config
from sluice.settings.batching import Policy
from sluice.v1 import inference_pb2, inference_pb2_grpc
from supervisor.mesh import Mesh

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub


MODEL = "large"
STREAMS = 64
REQUESTS = 3
ANSWER_TOKENS = 64
ECHO_TOKENS = 512
PROMPT = "What is the total of 314, 272, 973, 323, 486?"  # 55 tokens of answer
CALL_S = 120.0
IDLE_S = 30.0
TTFT_CALLS = 60
WARM_CALLS = 10


def bench_settings(path: str = "builtin:large") -> config.Settings:
    """A model, the shipped large tier unless given, and an echo model, with room for all streams."""
    return mesh_settings(
        config.ModelSettings(name=MODEL, tier="large", path=path, slots=STREAMS),
        echo(STREAMS),
        batcher=config.BatcherSettings(policy=Policy(max_rows=STREAMS)),
    )


class MeshClient:
    """Calls the gateway with the plain stubs: the SDK's costs are not the mesh's."""

    def __init__(self, stub: "Stub", model: str) -> None:
        self._stub = stub
        self._model = model

    async def first_token_s(self) -> float:
        """Seconds to the first token of one request on an idle mesh."""
        start = time.perf_counter()
        call = self._stub.Generate(self._request(4), timeout=CALL_S)
        first = None
        async for response in call:
            if first is None and response.delta.token_ids:
                first = time.perf_counter() - start
        assert first is not None
        return first

    async def tokens_per_s(self, streams: int, tokens: int) -> float:
        """Tokens/s of `streams` callers who each send `REQUESTS` requests, one after the other."""
        start = time.perf_counter()
        counts = await asyncio.gather(*(self._count_all(tokens) for _ in range(streams)))
        return sum(counts) / (time.perf_counter() - start)

    async def _count_all(self, tokens: int) -> int:
        return sum([await self._count(tokens) for _ in range(REQUESTS)])

    async def _count(self, tokens: int) -> int:
        count = 0
        async for response in self._stub.Generate(self._request(tokens), timeout=CALL_S):
            count += len(response.delta.token_ids)
        return count

    def _request(self, tokens: int) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            prompt=PROMPT,
            model=self._model,
            sampling=inference_pb2.SamplingParams(max_tokens=tokens),
        )


async def engine_share(mesh: Mesh, runs: int, suffix: str = "") -> Figure:
    """`mesh_vs_engine_throughput` beside Triton without the mesh: same model process, prompts and stop tokens."""
    prompt, stop = _prompt_tokens(mesh.settings)
    async with (
        mesh_client(mesh) as through_mesh,
        DirectWorker(mesh.worker_address(MODEL), MODEL) as direct,
    ):

        async def direct_tokens_per_s() -> float:
            start, tokens = time.perf_counter(), 0
            for _ in range(REQUESTS):
                tokens += await direct.answer(rows([prompt] * STREAMS, ANSWER_TOKENS, stop))
            return tokens / (time.perf_counter() - start)

        async def mesh_tokens_per_s() -> float:
            return await through_mesh.tokens_per_s(STREAMS, ANSWER_TOKENS)

        return await compare(
            f"mesh_vs_engine_throughput{suffix}",
            mesh_tokens_per_s,
            direct_tokens_per_s,
            unit="tokens/s",
            higher_is_better=True,
            runs=runs,
            note=f"{STREAMS} callers, {REQUESTS} answers each of up to {ANSWER_TOKENS} tokens; "
            f"peer: batches of {STREAMS} into Triton",
        )


async def first_tokens(mesh: Mesh, runs: int) -> list[Figure]:
    """`mesh_vs_triton_ttft`: one request at a time, alternating; percentiles over the calls of all runs."""
    prompt, stop = _prompt_tokens(mesh.settings)
    ours, peer = list[float](), list[float]()
    async with (
        mesh_client(mesh) as through_mesh,
        DirectWorker(mesh.worker_address(MODEL), MODEL) as direct,
    ):

        async def direct_first_token_s() -> float:
            start = time.perf_counter()
            await direct.first_token(rows([prompt], 4, stop))
            elapsed = time.perf_counter() - start
            await direct.finish()
            return elapsed

        for number in range(TTFT_CALLS * runs + WARM_CALLS):
            sides = [(through_mesh.first_token_s, ours), (direct_first_token_s, peer)]
            for call, found in sides if number % 2 else reversed(sides):
                found.append(1000 * await call())
    where = "one at a time, idle mesh; peer: straight into Triton"
    return percentiles("mesh_vs_triton_ttft", ours[WARM_CALLS:], peer[WARM_CALLS:], runs, where)


@asynccontextmanager
async def mesh_client(mesh: Mesh) -> AsyncIterator[MeshClient]:
    """A client of the model on its own connection."""
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        yield MeshClient(inference_pb2_grpc.InferenceServiceStub(channel), MODEL)


async def bench_echo(gateway: "Stub", runs: int) -> list[Figure]:
    """The echo engine through the mesh beside a bare stream of one-token messages."""
    mesh = MeshClient(gateway, "echo")
    async with bare_server() as server:
        bare = MeshClient(inference_pb2_grpc.InferenceServiceStub(server.channel), "bare")

        async def through_mesh() -> float:
            return await mesh.tokens_per_s(STREAMS, ECHO_TOKENS)

        async def through_bare() -> float:
            return await bare.tokens_per_s(STREAMS, ECHO_TOKENS)

        return [
            await compare(
                "mesh_echo_vs_grpc",
                through_mesh,
                through_bare,
                unit="tokens/s",
                higher_is_better=True,
                runs=runs,
                note=f"{STREAMS} callers, {REQUESTS} answers of {ECHO_TOKENS} tokens; peer: one token a message",
            )
        ]


def _prompt_tokens(settings: config.Settings, name: str = MODEL) -> tuple[list[int], list[int]]:
    """The prompt as the gateway would send it, and the stop tokens: Triton must get the same work on both ways."""
    model = load_catalog(settings)[name].tokenizer
    return model.encode_chat([{"role": "user", "content": PROMPT}]), list(model.stop_token_ids)


async def idle_cpu(processes: list[psutil.Process]) -> Figure:
    """CPU of all processes of the idle mesh, percent of one core."""
    before = _cpu_s(processes)
    await asyncio.sleep(IDLE_S)
    percent = 100 * (_cpu_s(processes) - before) / IDLE_S
    note = f"all {len(processes)} processes of the mesh over {IDLE_S:.0f} s without a request; bound: 3 %"
    return Figure("mesh_idle_cpu", percent, None, None, "% of one core", 1, machine(), note)


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def open_loop(names: list[str], runs: int) -> list[Figure]:
    """Figures on a mesh with the shipped settings, but for the large tier, which would share the cores."""
    settings = mesh_settings(*(one for one in config.Settings().models if one.name == SMALL))
    figures: list[Figure] = []
    async with mesh_of(settings) as mesh:
        if "interactive_beside_bulk" in names:
            figures += await interactive_beside_bulk(mesh.address, runs)
        if "openloop_ttft" in names:
            prompt, _ = _prompt_tokens(settings, SMALL)
            figures += await openloop_ttft(mesh.address, mesh.worker_address(SMALL), prompt, runs)
    return figures


async def main(args: argparse.Namespace) -> None:
    """Runs the figures asked for and prints them."""
    figures: list[Figure] = []
    for part in (overhead, request_cost, secured_vs_open, tls_vs_plain):
        if part.__name__ in (args.figures or ("overhead",)):
            figures += await part(args.runs)
    if {"interactive_beside_bulk", "openloop_ttft"} & set(args.figures):
        figures += await open_loop(args.figures, args.runs)
    emit(figures, args.json)


async def overhead(runs: int) -> list[Figure]:
    """Figures of the mesh beside Triton and gRPC alone."""
    async with (
        mesh_of(bench_settings()) as mesh,
        grpc.aio.insecure_channel(mesh.address) as channel,
    ):
        figures = [await engine_share(mesh, runs), *await first_tokens(mesh, runs)]
        figures += await bench_echo(inference_pb2_grpc.InferenceServiceStub(channel), runs)
        figures.append(await idle_cpu(psutil.Process().children(recursive=True)))
    with tempfile.TemporaryDirectory(prefix="sluice-model-") as folder:
        async with mesh_of(bench_settings(str(write_served_model(Path(folder))))) as mesh:
            figures.append(await engine_share(mesh, runs, "_29m"))
    return figures


if __name__ == "__main__":
    parser = options_of(__doc__)
    names = (
        *("overhead", "request_cost", "secured_vs_open", "tls_vs_plain"),
        *("interactive_beside_bulk", "openloop_ttft"),
    )
    # The default of "*" must be one of the choices as a whole.
    parser.add_argument("figures", nargs="*", choices=(*names, []), default=[], metavar="FIGURE")
    uvloop.run(main(parser.parse_args()))
