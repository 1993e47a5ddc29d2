"""`isolation` of tests/robustness/jobs.py: jobs of one tenant beside the worst jobs of another.

The hostile tenant is a process of its own: python -m tests.robustness.job_isolation ADDRESS KIND WEBHOOK. It says that
its inputs are there, waits for a line, creates its jobs and says what became of them.
"""

import asyncio
import io
import json
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import chain, cycle, islice, repeat
from typing import Any, Final

from bench.support.harness import Figure, machine
from bench.support.job_speed import pieces, short_lines
from bench.support.meshes import echo, mesh_of, mesh_settings
from sluice.client import AsyncClient
from sluice.errors import SluiceError
from sluice.settings import JobsSettings
from sluice.v1 import jobs_pb2 as pb
from tests.robustness.mesh_memory import watch_memory

MODEL: Final = "echo"
ITEMS: Final = 3
JOBS: Final = 20
HOSTILE_JOBS: Final = 1000
CALLS: Final = 16
"""Of the hostile tenant at the same time."""
PAUSE_S: Final = 0.5
"""Between two jobs of the other tenant, which so meet all that the hostile ones do."""
SAMPLE_S: Final = 0.2
MIB: Final = 1 << 20
SETTINGS: Final = mesh_settings(echo(64), jobs=JobsSettings(private_hosts=["127.0.0.1"]))


def _zstd(parts: Iterator[bytes]) -> bytes:
    from backports import zstd

    file = io.BytesIO()
    with zstd.ZstdFile(file, "w") as writer:
        for part in parts:
            writer.write(part)
    return file.getvalue()


def _parquet() -> bytes:
    """Rows of almost as many bytes as a row may have, all the same one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), ["x" * 900_000])
    file = io.BytesIO()
    pq.write_table(pa.table({"prompt": column}), file, compression="zstd")
    return file.getvalue()


def _lines(count: int) -> bytes:
    return b"".join(pieces(short_lines(count, 1)))


INPUTS: Final[Mapping[str, Callable[[], tuple[str, bytes]]]] = {
    "csv": lambda: ("in.csv", _zstd(chain((b"prompt\n",), repeat(b"x" * MIB, 1024)))),
    "parquet": lambda: ("in.parquet", _parquet()),
    "blank": lambda: ("in.jsonl", _zstd(repeat(b"\n" * MIB, 512))),
    "webhooks": lambda: ("in.jsonl", _lines(1)),
    "slow": lambda: ("in.jsonl", _lines(1000)),
}
MIXED: Final = "mixed"
KINDS: Final = (*INPUTS, MIXED)


async def isolation(kinds: tuple[str, ...]) -> list[Figure]:
    """See tests/robustness/jobs.py."""
    return [await _figure(kind) for kind in kinds]


async def _figure(kind: str) -> Figure:
    async with (
        _silent_receiver() as webhook,
        mesh_of(SETTINGS) as mesh,
        AsyncClient(mesh.address, tenant="other") as other,
    ):
        await _job_s(other)  # warms up
        alone = [await _job_s(other) for _ in range(JOBS)]
        highest = Counter[str]()
        attacker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.robustness.job_isolation", mesh.address, kind, webhook),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert attacker.stdout is not None, "piped"
        assert await attacker.stdout.readline(), "the inputs are there"
        hostile = asyncio.ensure_future(attacker.communicate(b"begin\n"))
        watching = asyncio.ensure_future(watch_memory(mesh, highest, SAMPLE_S))
        beside = [await _job_s(other) for _ in range(JOBS)]
        while not hostile.done():  # until all of them are there
            beside.append(await _job_s(other))
        outcomes = json.loads((await hostile)[0])
        watching.cancel()
        await asyncio.wait([watching])
    ours, peer = statistics.median(beside), statistics.median(alone)
    also = {
        "worst_s": max(beside),
        "alone_worst_s": max(alone),
        "jobs_process_mib": float(highest["jobs"]),
        **{f"hostile_{name}": float(count) for name, count in outcomes.items()},
    }
    note = (
        f"seconds of a job of {ITEMS} items beside {HOSTILE_JOBS:,} of another tenant; peer: alone"
    )
    settings = {"kind": kind, "items": ITEMS, "hostile_jobs": HOSTILE_JOBS, "calls": CALLS}
    name = f"jobs_isolation_{kind}"
    return Figure(name, ours, peer, peer / ours, "s", len(beside), machine(), note, settings, also)


@asynccontextmanager
async def _silent_receiver() -> AsyncIterator[str]:
    """The URL of a server that takes connections, and never answers."""
    taken: list[Any] = []
    server = await asyncio.start_server(lambda *streams: taken.append(streams), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()
        for _, writer in taken:
            writer.close()


async def _job_s(client: AsyncClient) -> float:
    """Seconds from the begin of the upload until the client has the last result; then a moment of rest."""
    begun = time.perf_counter()
    upload = await client.jobs.upload("in.jsonl", lambda: pieces(short_lines(ITEMS, 1)))
    spec = pb.JobSpec(model=MODEL, input=pb.JobInput(upload_id=upload))
    job = await client.jobs.create(spec, uuid.uuid4().hex)
    found = [one async for one in client.jobs.results(job.id, follow=True)]
    took_s = time.perf_counter() - begun
    assert all(one.HasField("answer") for one in found), found
    assert len(found) == ITEMS
    await asyncio.sleep(PAUSE_S)
    return took_s


async def attack(address: str, kind: str, webhook: str) -> Counter[str]:
    """Creates `HOSTILE_JOBS` jobs as fast as they are taken; how many were, and how many not, by reason."""
    outcomes: Counter[str] = Counter()
    async with AsyncClient(address, tenant="hostile") as client:
        kinds = list(INPUTS) if kind == MIXED else [kind]
        specs = [await _spec(client, one, webhook) for one in kinds]
        left = islice(cycle(specs), HOSTILE_JOBS)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

        async def create() -> None:
            for spec in left:
                try:
                    await client.jobs.create(spec, uuid.uuid4().hex)
                    outcomes["created"] += 1
                except SluiceError as error:
                    outcomes[error.reason.lower()] += 1

        await asyncio.gather(*(create() for _ in range(CALLS)))
    return outcomes


async def _spec(client: AsyncClient, kind: str, webhook: str) -> pb.JobSpec:
    name, data = await asyncio.to_thread(INPUTS[kind])
    upload = await client.jobs.upload(name, lambda: iter([data]))
    spec = pb.JobSpec(model=MODEL, input=pb.JobInput(upload_id=upload))
    spec.limits.max_bad_line_share = 1.0
    if kind == "webhooks":
        spec.webhook.url, spec.webhook.secret = webhook, "a secret of enough characters"
    if kind == "slow":
        spec.limits.requests_per_minute, spec.limits.concurrency = 1, 1
    return spec


if __name__ == "__main__":
    print(json.dumps(asyncio.run(attack(*sys.argv[1:]))))
