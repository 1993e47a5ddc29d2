"""A job whose mesh is killed piece by piece, beside the same job on a calm mesh: jobs.py says what is counted."""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import grpc
import nats
from nats.aio.msg import Msg

from bench.support.harness import Figure, machine
from bench.support.job_speed import JobClient, Line, Outcome, job_client, task_lines
from bench.support.triton_direct import DirectWorker
from sluice.internal.v1.job_pb2 import JobSegment
from sluice.internal.v1.worker_pb2 import WorkerCounts
from sluice.startup import LOOPBACK
from sluice.wire import subjects
from sluice.wire.codec import unpack
from tests.robustness.faults.mesh import FaultMesh, Topology
from tests.robustness.faults.registry import FAULTS
from tests.robustness.faults.start import fault_mesh

KINDS: Final = ("batcher", "worker", "gateway", "nats", "jobs")
TOKENS: Final = 16
EVERY_S: Final = 10.0
RETRY_S: Final = 0.2
SILENT_S: Final = 2.0
SETTLED_S: Final = 0.5
"""What was computed before a kill is written by then."""
GONE_S: Final = 60.0
"""A job that does not go on for so long is given up."""
CALM_ITEMS: Final = 200
"""Of a job that warms the mesh up."""
MODEL: Final = "small"


@asynccontextmanager
async def counted(mesh: FaultMesh) -> AsyncIterator[Callable[[], int]]:
    """Answer tokens that the workers have computed, all lives of each together, as their heartbeats say.

    A worker counts a prompt only when its row has ended.
    """
    counts: dict[str, WorkerCounts] = {}
    # A cancel alone may be hidden by a report that comes at the same moment (Python 3.11).
    closed = asyncio.Event()

    async def read(address: str) -> None:
        while not closed.is_set():
            with suppress(grpc.RpcError, ConnectionError, TimeoutError, AssertionError):
                async with DirectWorker(address, MODEL, heartbeat_ms=100) as worker:
                    while not closed.is_set():
                        async with asyncio.timeout(SILENT_S):  # a killed one may say nothing
                            report = await worker.report()
                        if report.HasField("counts"):
                            counts[report.worker] = report.counts
            await asyncio.sleep(RETRY_S)

    ports = [mesh.supervisor.process(name).spec.port for name in mesh.names["triton"]]
    readers = [asyncio.ensure_future(read(f"{LOOPBACK}:{port}")) for port in ports]
    try:
        yield lambda: sum(one.tokens for one in counts.values())
    finally:
        closed.set()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


class Written:
    """When the mesh has written results: NATS tells everybody who listens."""

    def __init__(self) -> None:
        self._at = 0.0
        self._changed = asyncio.Event()

    async def after(self, at: float) -> float:
        """When items were written for the first time after ``at``, monotonic seconds."""
        while self._at <= at:
            self._changed.clear()
            await self._changed.wait()
        return self._at

    async def note(self, message: Msg) -> None:
        """A segment came."""
        if unpack(JobSegment, message.data).outcomes:
            self._at = time.monotonic()
            self._changed.set()


@asynccontextmanager
async def written(mesh: FaultMesh) -> AsyncIterator[Written]:
    """Listens to ``mesh`` for as long as the block runs."""

    async def ignore(_: Exception) -> None:
        """NATS is killed too."""

    seen = Written()
    client = await nats.connect(
        mesh.nats_urls, error_cb=ignore, reconnect_time_wait=0.05, max_reconnect_attempts=-1
    )
    try:
        await client.subscribe(f"{subjects.JOB_RESULTS}.>", cb=seen.note)
        yield seen
    finally:
        await client.close()


@dataclass
class Run:
    """One job.

    Attributes:
        answers: ids and texts, in order.
        tokens: that the workers computed.
        resumes: seconds from each kill to the next item that was computed after it and written, at least `SETTLED_S`.
    """

    answers: list[tuple[str, str]] = field(default_factory=list)
    tokens: int = 0
    took_s: float = 0.0
    resumes: list[float] = field(default_factory=list)


async def kills(kinds: Sequence[str], items: int, seconds: float) -> list[Figure]:
    """See tests/robustness/jobs.py."""
    return [await _killed(kind, items, seconds) for kind in kinds]


async def _killed(kind: str, items: int, seconds: float) -> Figure:
    topology = Topology(jobs=1)
    if kind == "worker":
        topology = replace(topology, workers=2, standby=1)
    lines = task_lines(items, 1, TOKENS)
    with tempfile.TemporaryDirectory(prefix="sluice-jobs-kill-") as folder:
        async with (
            fault_mesh(topology, Path(folder)) as mesh,
            job_client(mesh.addresses[0], MODEL) as jobs,
        ):
            await jobs.run(task_lines(CALM_ITEMS, 0, TOKENS))
            calm = await _run(mesh, jobs, lines, None, 0.0)
            killed = await _run(mesh, jobs, lines, kind, seconds)
            notes = mesh.notes
    names = Counter(name for name, _ in killed.answers)
    missing = sum(names[line["id"]] != 1 for line in lines) + len(names.keys() - set(_ids(lines)))
    expected = dict(calm.answers)
    also = {
        "missing": float(missing),
        "different": float(sum(expected[name] != text for name, text in killed.answers)),
        "resume_max_s": max(killed.resumes, default=0.0),
        "kills": float(len(killed.resumes)),
        "took_s": killed.took_s,
        "calm_s": calm.took_s,
    }
    again = killed.tokens / calm.tokens - 1
    note = f"{items:,} items, {kind} killed every {EVERY_S:g} s for {seconds:g} s; bound: 0.05"
    note = "; ".join([note, *notes])
    settings = {"items": items, "answer_tokens": TOKENS}
    figure, unit = f"jobs_kill_{kind}", "share of tokens"
    return Figure(figure, again, None, None, unit, 1, machine(), note, settings, also)


def _ids(lines: list[Line]) -> list[str]:
    return [line["id"] for line in lines]


async def _run(
    mesh: FaultMesh, jobs: JobClient, lines: list[Line], kind: str | None, seconds: float
) -> Run:
    run = Run()
    async with counted(mesh) as computed:
        await asyncio.sleep(1.0)  # a heartbeat of each worker
        before, begun = computed(), time.monotonic()
        job = await jobs.submit(lines)
        ending = asyncio.ensure_future(jobs.end(job))
        if kind is not None:
            await kill_for(seconds, mesh, kind, ending, run.resumes)
        await ending
        run.took_s = time.monotonic() - begun
        _say(f"{run.took_s:6.1f} s  {len(lines):,} items, {kind or 'nothing'} killed")
        await asyncio.sleep(1.0)
        run.tokens = computed() - before
        run.answers = await jobs.answers(job)
    return run


async def kill_for(
    seconds: float,
    mesh: FaultMesh,
    kind: str,
    ending: asyncio.Future[Outcome],
    into: list[float],
) -> None:
    """Kills every now and then until the time, or the job, is over."""
    begun = time.monotonic()
    async with written(mesh) as seen:
        while time.monotonic() < begun + seconds:
            await asyncio.wait([ending], timeout=EVERY_S)
            if ending.done():
                return
            killed_at = time.monotonic()
            await FAULTS[f"{kind}-kill"].strike(mesh)
            going = asyncio.ensure_future(seen.after(killed_at + SETTLED_S))
            waits: set[asyncio.Future[Any]] = {going, ending}
            await asyncio.wait(waits, timeout=GONE_S, return_when=asyncio.FIRST_COMPLETED)
            if not going.done():
                going.cancel()
                if ending.done():
                    return
            into.append(going.result() - killed_at if going.done() else GONE_S)
            _say(f"{killed_at - begun:6.1f} s  {kind} killed, on after {into[-1]:.2f} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
