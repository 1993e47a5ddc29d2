"""CPU time of a one-token request, by process: of a mesh with the echo engine, and of a bare grpc.aio server.

Settings: one model, `engine: echo`, 64 slots, everything else as shipped, no tracing. Callers send and take bytes, and
read each stream to its end, each sends its next request when the last has ended; the prompt is `PROMPT`, no sampling,
so no seeds. The bare server is
grpc.aio under uvloop and sends the message that the gateway sends, with started, delta and finished in it.

CPU time is user and system time of the servers' processes over a run, divided by the requests answered in it
(`REQUESTS`); what they do while idle in that time counts, the client does not. Runs of the mesh and of the bare server
alternate, after one warm-up of each; figures are medians.

- `gateway_cpu_vs_bare_grpc`: `MANY` callers; milliseconds of the gateway's process and of the bare server's; the ratio
  is bare over ours. `also` has the other processes of the mesh.
- `mesh_requests_per_s`: the same runs; requests answered a second, client on the same machine.
- `mesh_cpu_lone_ms`: one caller; milliseconds of all processes of the mesh, and of the bare server.
- `secured_vs_open`: `MANY` callers; milliseconds of the gateway's process where calls have an API key, and its tenant
  limits of requests, tokens and calls, and of the mesh above; the ratio is the latter over the former.
- `tls_vs_plain`: `MANY` callers on one connection; milliseconds of the gateway's process of a mesh with certificates
  (`tls.embedded`), and of the mesh above; the ratio is the latter over the former. `also` has the other processes.
- `cache_hit_vs_computed`: `MANY` callers; milliseconds of the gateway's process where every request but the
  first of the warm-up finds its answer in the cache (`cache.enabled`, all ask the same), and of the mesh above; the
  ratio is the former over the latter.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import nats
import psutil

from bench.support.bare_stream import EVENTS
from bench.support.harness import Figure, check_runs, machine
from bench.support.http_load import stream_chats
from bench.support.meshes import echo, mesh_of, mesh_settings, ports_of, program
from sluice import settings as config
from sluice.client.channel import bearer_metadata
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.settings.limits import LimitSettings
from sluice.tls import open_channel
from sluice.v1 import inference_pb2
from sluice.wire import jetstream
from sluice.wire.api_keys import digest_of, new_key
from sluice.wire.bucket import Bucket
from supervisor.mesh import Mesh

PROMPT: Final = "What is the total of 314, 272, 973, 323, 486?"
MODEL: Final = "echo"
SLOTS: Final = 64
MANY: Final = 32
REQUESTS: Final = {MANY: 1000, 1: 300}
"""In a run, by the number of callers."""
GENERATE: Final = "/sluice.v1.InferenceService/Generate"
CALL_S: Final = 60.0
KNOWN_S: Final = 5.0
"""Gateways know a new key then, seconds."""
LIMITS: Final = LimitSettings(
    requests_per_minute=1e6, tokens_per_minute=1e9, burst_s=60, concurrent=500
)
Processes = Mapping[str, psutil.Process]


@dataclass(frozen=True)
class Server:
    """One side: a mesh or the bare server.

    Attributes:
        http: calls go here over HTTP, as streams of /v1/chat/completions; else over gRPC.
        api_key: who calls.
    """

    channel: grpc.aio.Channel
    model: str
    processes: Processes
    http: str | None = None
    api_key: str | None = None


@dataclass(frozen=True)
class Cost:
    """What one request took in a run: milliseconds of CPU by process, and requests/s of all callers."""

    cpu_ms: Mapping[str, float]
    requests_per_s: float


async def request_cost(runs: int) -> list[Figure]:
    """The figures above."""
    check_runs(runs)
    async with echo_mesh() as mesh, bare_server() as bare:
        many, bare_many = await interleaved(mesh, bare, MANY, runs)
        lone, bare_lone = await interleaved(mesh, bare, 1, runs)
        async with echo_mesh(config.CacheSettings(enabled=True)) as caching:
            computed, hits = await interleaved(mesh, caching, MANY, runs)
    by_process, by_process_lone = medians(many), medians(lone)
    settings = {"callers": MANY, "slots": SLOTS, "requests": REQUESTS}
    bare_ms, gateway_ms = total(bare_many), by_process["gateway"]
    rate = statistics.median(run.requests_per_s for run in many)
    bare_rate = statistics.median(run.requests_per_s for run in bare_many)
    lone_ms, bare_lone_ms = total(lone), total(bare_lone)
    hit_ms, computed_ms = medians(hits)["gateway"], medians(computed)["gateway"]
    rows: list[tuple[Any, ...]] = [
        ("gateway_cpu_vs_bare_grpc", gateway_ms, bare_ms, bare_ms / gateway_ms, "ms of CPU",
         f"a one-token request, {MANY} callers; peer: the same messages from a bare grpc.aio server", by_process),
        ("mesh_requests_per_s", rate, bare_rate, rate / bare_rate, "requests/s",
         f"one-token requests, {MANY} callers; peer: a bare grpc.aio server", {}),
        ("mesh_cpu_lone_ms", lone_ms, bare_lone_ms, bare_lone_ms / lone_ms, "ms of CPU",
         "a one-token request of a lone caller, all processes; peer: a bare grpc.aio server", by_process_lone),
        ("cache_hit_vs_computed", hit_ms, computed_ms, hit_ms / computed_ms, "ms of CPU",
         f"gateway, a one-token answer found in the cache, {MANY} callers; peer: the same answer computed", {}),
    ]  # fmt: skip
    return [
        Figure(name, ours, peer, ratio, unit, runs, machine(), note, settings, in_ms(also))
        for name, ours, peer, ratio, unit, note, also in rows
    ]


async def secured_vs_open(runs: int) -> list[Figure]:
    """The figure of that name."""
    check_runs(runs)
    async with echo_mesh(secured=True) as secured, echo_mesh() as unsecured:
        ours, peer = await interleaved(secured, unsecured, MANY, runs)
    return [_beside_open("secured_vs_open", "API key and limits", ours, peer)]


async def tls_vs_plain(runs: int) -> list[Figure]:
    """The figure of that name."""
    check_runs(runs)
    async with echo_mesh(tls=True) as encrypted, echo_mesh() as plain:
        ours, peer = await interleaved(encrypted, plain, MANY, runs)
    return [_beside_open("tls_vs_plain", "TLS on every hop", ours, peer)]


def _beside_open(figure: str, what: str, ours: list[Cost], peer: list[Cost]) -> Figure:
    """The gateway's CPU beside that of a mesh without ``what``."""
    costs, open_ms = medians(ours), medians(peer)["gateway"]
    note = f"gateway, a one-token request, {MANY} callers, {what}; peer: without"
    settings = {"callers": MANY, "slots": SLOTS, "requests": REQUESTS[MANY]}
    ours_ms = costs["gateway"]
    values = (ours_ms, open_ms, open_ms / ours_ms, "ms of CPU", len(ours), machine(), note)
    return Figure(figure, *values, settings, in_ms(costs))


@asynccontextmanager
async def echo_mesh(
    cache: config.CacheSettings | None = None,
    http: str | None = None,
    secured: bool = False,
    tls: bool = False,
) -> AsyncIterator[Server]:
    """The mesh.

    Args:
        cache: as shipped unless given.
        http: where it serves HTTP, if it does.
        secured: callers need an API key, and have limits that they do not reach.
        tls: every connection has certificates.
    """
    settings = mesh_settings(
        echo(SLOTS),
        http=config.HttpSettings(address=http),
        cache=cache or config.CacheSettings(),
        identity=config.IdentitySettings(api_keys=secured),
        limits=LIMITS if secured else LimitSettings(),
        tls=config.TlsSettings(embedded=tls),
    )
    async with (
        mesh_of(settings) as mesh,
        open_channel(mesh.address, _trusted(mesh), ()) as channel,
    ):
        key = await made_key(mesh) if secured else None
        yield Server(channel, MODEL, processes_of(mesh), mesh.http, key)


def _trusted(mesh: Mesh) -> grpc.ChannelCredentials | None:
    return None if mesh.ca is None else grpc.ssl_channel_credentials(mesh.ca.read_bytes())


async def made_key(mesh: Mesh) -> str:
    """An API key that the gateway of ``mesh`` knows."""
    client, made = await nats.connect(mesh.settings.nats.url), new_key()
    bucket = Bucket(jetstream.API_KEYS)
    await bucket.start(client)
    record = ApiKeyRecord(digest=digest_of(made.text), tenant="acme", roles=["caller"])
    await bucket.write(made.id, record)
    await client.close()
    await asyncio.sleep(KNOWN_S)
    return made.text


@asynccontextmanager
async def bare_server() -> AsyncIterator[Server]:
    """The bare server, in a process of its own."""
    async with program("bare_stream") as process:
        (port,) = await ports_of(process)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Server(channel, EVENTS, {"bare": psutil.Process(process.pid)})


async def interleaved(
    ours: Server, peer: Server, callers: int, runs: int, slices: int = 1
) -> tuple[list[Cost], list[Cost]]:
    """Runs of both sides, each the mean of ``slices`` that alternate; the first slice, a warm-up, is left out."""
    found: tuple[list[Cost], list[Cost]] = ([], [])
    for number in range(runs * slices + 1):
        sides = list(zip((ours, peer), found, strict=True))
        for server, costs in sides if number % 2 else reversed(sides):
            costs.append(await run(server, callers, REQUESTS[callers]))
    starts = range(1, runs * slices + 1, slices)
    first, second = ([_mean(costs[at : at + slices]) for at in starts] for costs in found)
    return first, second


def _mean(costs: Sequence[Cost]) -> Cost:
    """Of slices with as many requests each."""
    cpu_ms = {name: statistics.fmean(one.cpu_ms[name] for one in costs) for name in costs[0].cpu_ms}
    return Cost(cpu_ms, statistics.harmonic_mean([one.requests_per_s for one in costs]))


async def run(server: Server, callers: int, requests: int) -> Cost:
    """What each of ``requests`` by ``callers`` costs the server."""
    before, start = _cpu_s(server.processes), time.perf_counter()
    await call(server, callers, requests)
    elapsed = time.perf_counter() - start
    after = _cpu_s(server.processes)
    spent = {name: 1e3 * (s - before[name]) / requests for name, s in after.items()}
    return Cost(spent, requests / elapsed)


async def call(server: Server, callers: int, requests: int) -> None:
    """``requests`` one-token calls by ``callers``."""
    if server.http is not None:
        body = {"model": server.model, "messages": [{"role": "user", "content": PROMPT}]}
        await stream_chats(server.http, {**body, "max_tokens": 1}, callers, requests)
        return
    left, metadata = itertools.count(requests, -1), bearer_metadata(server.api_key)
    request = inference_pb2.GenerateRequest(
        prompt=PROMPT, model=server.model, sampling=inference_pb2.SamplingParams(max_tokens=1)
    )
    # The prompt once more, where releases before this message had it.
    packed = request.SerializeToString() + b"\x0a" + bytes([len(PROMPT)]) + PROMPT.encode()
    generate = server.channel.unary_stream(GENERATE)

    async def caller() -> None:
        while next(left) > 0:
            size = 0
            async for message in generate(packed, timeout=CALL_S, metadata=metadata):
                size += len(message)
            assert size, "every request is answered"

    await asyncio.gather(*(caller() for _ in range(callers)))


def processes_of(mesh: Mesh) -> dict[str, psutil.Process]:
    """The processes of a mesh and their children (a Triton's stub), by name."""
    found = {}
    for state in mesh.state.processes:
        process = found[state.name] = psutil.Process(state.pid)
        for number, child in enumerate(process.children(recursive=True)):
            found[f"{state.name} child {number}"] = child
    return found


def _cpu_s(processes: Processes) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def medians(costs: list[Cost]) -> dict[str, float]:
    """By process."""
    return {name: statistics.median(one.cpu_ms[name] for one in costs) for name in costs[0].cpu_ms}


def total(costs: list[Cost]) -> float:
    """Of all processes."""
    return statistics.median(sum(one.cpu_ms.values()) for one in costs)


def in_ms(by_process: Mapping[str, float]) -> dict[str, float]:
    """As further values of a figure."""
    return {f"{name.replace(' ', '_')}_ms": ms for name, ms in by_process.items()}
