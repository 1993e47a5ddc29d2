"""Parts of bench/jobs.py with the echo engine: what grows with a job, and what identical prompts save."""

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from bench.support.harness import Figure, machine
from bench.support.job_client import JobClient, Line, job_client, short_lines
from bench.support.mesh_memory import memory_of
from bench.support.request_cost import processes_of
from sluice import settings as config
from sluice.settings.routing import RoutingSettings
from supervisor.mesh import Mesh, running_mesh

MODEL: Final = "echo"
SLOTS: Final = 64
TOKENS: Final = 8
SMALL: Final = 1000
SAMPLE_S: Final = 0.5
IDENTICAL: Final = 0.3
NATS: Final = "nats"


@asynccontextmanager
async def echo_mesh() -> AsyncIterator[tuple[Mesh, JobClient]]:
    """A mesh with the echo engine that has run a job, and a client of it."""
    model = config.ModelSettings(name=MODEL, path="builtin:small", engine="echo", slots=SLOTS)
    settings = config.Settings(
        models=(model,),
        routing=RoutingSettings(default=MODEL),
        gateway=config.GatewaySettings(address="127.0.0.1:0"),
    )
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        async with (
            running_mesh(settings, state_dir=Path(folder)) as mesh,
            job_client(mesh.address, MODEL) as client,
        ):
            await client.run(short_lines(SMALL, TOKENS))
            yield mesh, client


@dataclass
class Watched:
    """What was seen of one job.

    Attributes:
        memory: MiB by process, the most of the last tenth of the samples.
        cpu_ms: of all processes, an item.
        disk: bytes of NATS's files at the begin and at the end.
        nats: resident bytes of NATS, the same.
    """

    memory: dict[str, float] = field(default_factory=dict)
    cpu_ms: float = 0.0
    disk: tuple[int, int] = (0, 0)
    nats: tuple[float, float] = (0.0, 0.0)

    @property
    def ours_mib(self) -> float:
        return sum(mib for name, mib in self.memory.items() if name != NATS)


async def growth(items: int) -> list[Figure]:
    """See bench/jobs.py."""
    async with echo_mesh() as (mesh, client):
        small = await _watch(mesh, client, SMALL)
        large = await _watch(mesh, client, items)
    settings = {"items": items, "slots": SLOTS, "answer_tokens": TOKENS}
    also = {f"{name.replace('-', '_')}_mib": mib for name, mib in large.memory.items()}
    also |= {f"{name.replace('-', '_')}_small_mib": mib for name, mib in small.memory.items()}
    note = f"a job of {items:,} items beside one of {SMALL:,}; NATS is not in it"

    def figure(
        name: str, ours: float, peer: float | None, unit: str, also: Mapping[str, float]
    ) -> Figure:
        ratio = None if peer is None else peer / ours
        return Figure(name, ours, peer, ratio, unit, 1, machine(), note, settings, also)

    return [
        figure("jobs_memory_growth", large.ours_mib, small.ours_mib, "MiB", also),
        figure("jobs_cost_growth", large.cpu_ms, small.cpu_ms, "ms of CPU an item", {}),
        figure("jobs_nats_disk_bytes", _grown(large.disk) / items, None, "bytes an item", {}),
        figure("jobs_nats_memory_bytes", _grown(large.nats) / items, None, "bytes an item", {}),
    ]


def _grown(pair: tuple[float, float]) -> float:
    return pair[1] - pair[0]


async def _watch(mesh: Mesh, client: JobClient, items: int) -> Watched:
    seen, samples = Watched(), list[dict[str, float]]()

    async def sample() -> None:
        while True:
            samples.append({name: kib / 1024 for name, kib in memory_of(mesh).items()})
            await asyncio.sleep(SAMPLE_S)

    disk, nats, cpu = _disk_bytes(mesh), memory_of(mesh)[NATS], _cpu_s(mesh)
    sampling = asyncio.ensure_future(sample())
    try:
        await client.run(short_lines(items, TOKENS))
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])
    seen.cpu_ms = (_cpu_s(mesh) - cpu) / items * 1e3
    seen.disk = disk, _disk_bytes(mesh)
    seen.nats = nats * 1024, memory_of(mesh)[NATS] * 1024
    last = samples[-max(1, len(samples) // 10) :]
    seen.memory = {name: max(one.get(name, 0.0) for one in last) for name in last[-1]}
    return seen


def _cpu_s(mesh: Mesh) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes_of(mesh).values())


def _disk_bytes(mesh: Mesh) -> int:
    """Of the files that JetStream has."""
    total = 0
    for path in mesh.state_dir.nats.rglob("*"):
        with suppress(FileNotFoundError):  # NATS replaces them
            total += path.stat().st_size if path.is_file() else 0
    return total


async def first_item(runs: int, items: int) -> list[Figure]:
    """See bench/jobs.py."""
    found: dict[int, list[float]] = {SMALL: [], items: []}
    async with echo_mesh() as (_, client):
        for round_ in range(runs):
            for size in list(found) if round_ % 2 else reversed(list(found)):
                took_s, job = await client.first_result_s(_mixed_lines(size))
                found[size].append(took_s)
                await client.stop(job)
    ours, peer = statistics.median(found[items]), statistics.median(found[SMALL])
    note = f"the first of {items:,} items; peer: of {SMALL:,}; {min(found[items]):.3g} to {max(found[items]):.3g}"
    settings = {"items": items}
    return [
        Figure("jobs_first_item_s", ours, peer, peer / ours, "s", runs, machine(), note, settings)
    ]


def _mixed_lines(count: int) -> Iterator[Line]:
    """Items, of twenty one that is none, and two whose prompt came before."""
    for number, line in enumerate(short_lines(count, TOKENS)):
        if number % 20 == 3:
            yield {"id": line["id"]}
        elif number % 10 == 7:
            yield {**line, "prompt": "item 0 of many"}
        else:
            yield line


async def dedupe(items: int) -> list[Figure]:
    """See bench/jobs.py."""
    different = list(short_lines(items, TOKENS))
    fresh = round(items * (1 - IDENTICAL))
    prompts = cycle(line["prompt"] for line in different[:fresh])
    identical = [
        {**line, "prompt": prompt}
        for line, prompt in zip(different, islice(prompts, items), strict=True)
    ]
    async with echo_mesh() as (_, client):
        whole = await client.run(different)
        less = await client.run(identical)
    ours = 1 - less.tokens / whole.tokens
    note = (
        f"{items:,} items; the job itself reports {less.job.progress.saved_tokens:,} saved tokens"
    )
    settings = {"items": items}
    ratio = ours / IDENTICAL
    return [
        Figure(
            "jobs_dedupe_saving",
            ours,
            IDENTICAL,
            ratio,
            "share of tokens",
            1,
            machine(),
            note,
            settings,
        )
    ]
