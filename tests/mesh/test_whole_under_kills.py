"""Traces beside kills of gateway, batcher and worker under 32 callers are whole; calls of every kind."""

import asyncio
import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.trace_rules import faults, is_model
from sluice.client.aio import AsyncClient
from sluice.errors import SluiceError, UnknownModel
from sluice.settings import Settings
from sluice.telemetry import names
from sluice.v1.jobs_pb2 import JobInput, JobSpec
from supervisor.health import wait_until_serving
from supervisor.mesh import Mesh, running_mesh
from tests.support.mesh import CASCADE, environment, kill, small_settings
from tests.support.otlp import OtlpReceiver, otlp_receiver
from tests.support.spans import SpanRecord

pytestmark = [pytest.mark.mesh, pytest.mark.long, pytest.mark.timeout(600)]

CALLERS = 32
TOKENS = 100
BOUND_S = 300.0
"""Of a call: its deadline must not end it on a machine that does much else."""
SETTLED_S = 60.0
BETWEEN_S = 2.0
"""Long enough for streams to be under way, and for spans of earlier ones to be sent."""
UNSENT_NS = 2_000_000_000
"""How long a process may keep a span that has ended."""
STRUCK = ("triton-small", "batcher", "gateway", "gateway.1")


def settings_of(receiver: OtlpReceiver) -> Settings:
    settings = small_settings(receiver.http_endpoint)
    update = {
        "gateway": settings.gateway.model_copy(update={"replicas": 2}),
        "triton": settings.triton.model_copy(update={"start_s": 240.0}),
    }
    return settings.model_copy(update=update)


class Callers:
    """They ask until the mesh was struck often enough; the client resumes at the other gateway by itself."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._asked = [0] * CALLERS
        self._changed = asyncio.Condition()
        self._done = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for number in range(CALLERS):
                group.create_task(self._ask(number))
            yield
            self._done = True

    async def all_new(self) -> None:
        """Until no call runs that runs now."""
        before = list(self._asked)
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(lambda: all(map(int.__gt__, self._asked, before)))

    async def _ask(self, number: int) -> None:
        async with AsyncClient(self._mesh.address) as client:
            while not self._done:
                async with self._changed:
                    self._asked[number] += 1
                    self._changed.notify_all()
                labels = CASCADE if number % 8 == 0 else {}
                stream = client.generate(
                    f"classify: order {number} is late",
                    model="auto" if labels else "small",
                    labels=labels,
                    max_tokens=TOKENS,
                    min_tokens=TOKENS,
                    timeout_s=BOUND_S,
                )
                await stream.answer()


async def struck(mesh: Mesh, name: str, callers: Callers) -> int:
    """Kill a process while streams run, none of which has lost one before, and wait until the mesh serves again.

    Return when it was killed, in Unix nanoseconds.
    """
    await callers.all_new()
    await asyncio.sleep(BETWEEN_S)
    process = mesh.supervisor.process(name)
    restarts = process.restarts
    killed_ns = time.time_ns()
    kill(mesh, name)
    await mesh.supervisor.wait_for(lambda: process.restarts > restarts, BOUND_S)
    for address in mesh.address.split(","):
        await wait_until_serving(address, ["small", "large"], BOUND_S)
    return killed_ns


async def calls_of_every_kind(mesh: Mesh) -> None:
    async with AsyncClient(mesh.address) as client:
        with pytest.raises(UnknownModel):
            await client.generate("classify: x", model="nope").answer()
        for _ in range(2):  # The second is replayed.
            await client.generate(
                "classify: y", model="small", max_tokens=8, idempotency_key="again"
            ).answer()
        await client.generate("sum: 4 7 12 40", labels=CASCADE, max_tokens=8).answer()
        with contextlib.suppress(SluiceError):
            await client.generate("classify: z", model="large", timeout_s=0.001).answer()
        async with client.generate("classify: z", model="large", min_tokens=TOKENS) as stream:
            await anext(stream)  # cancelled by its caller behind its first event
        await run_job(client)


async def run_job(client: AsyncClient) -> None:
    items = [json.dumps({"id": f"i{n}", "prompt": f"classify: item {n}"}) for n in range(4)]
    upload = await client.jobs.upload("in.jsonl", lambda: ["\n".join(items).encode()])
    spec = JobSpec(model="small", input=JobInput(upload_id=upload))
    job = await client.jobs.create(spec, "")
    async for seen in client.jobs.watch(job.id):
        job = seen
    assert job.progress.succeeded == len(items)


def faults_of(spans: Iterable[SpanRecord], kills: Sequence[int]) -> dict[str, list[str]]:
    """Return the faults of each trace that is not whole, but for those that overlap a kill."""
    traces: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    known = {(span.trace_id, span.span_id) for trace in traces.values() for span in trace}
    wrong = {
        trace_id: faults([span.of_trace() for span in trace], known)
        for trace_id, trace in traces.items()
        if not overlaps(trace, kills)
    }
    return {trace_id: found for trace_id, found in wrong.items() if found}


def overlaps(trace: Sequence[SpanRecord], kills: Sequence[int]) -> bool:
    begins_ns = min(span.start_ns for span in trace)
    ends_ns = max(span.end_ns for span in trace) + UNSENT_NS
    return any(begins_ns <= killed_ns <= ends_ns for killed_ns in kills)


def jobs_of(spans: Iterable[SpanRecord]) -> set[str]:
    return {span.span_id for span in spans if span.name == names.SPAN_JOB}


async def test_traces_beside_kills_are_whole(tmp_path: Path) -> None:
    async with otlp_receiver() as receiver:
        with environment({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint}):
            async with running_mesh(settings_of(receiver), tmp_path / "state") as mesh:
                callers = Callers(mesh)
                async with callers.running():
                    kills = [await struck(mesh, name, callers) for name in STRUCK]
                await calls_of_every_kind(mesh)
                with contextlib.suppress(TimeoutError):
                    await receiver.wait_for(lambda spans: not faults_of(spans, kills), SETTLED_S)
        spans = receiver.spans.snapshot()
    wrong = faults_of(spans, kills)
    kinds = Counter(fault for found in wrong.values() for fault in found)
    assert not wrong, f"{len(wrong)} of {len({s.trace_id for s in spans})}: {kinds.most_common(20)}"
    roots = [span for span in spans if span.name == names.SPAN_GENERATE]
    recovered = [root for root in roots if root.attributes.get(names.RECOVERED)]
    causes = {root.attributes[names.RECOVERED_FROM] for root in recovered}
    assert causes == {"worker", "batcher"}
    assert all(root.attributes[names.RECOVERED_GAP_S] for root in recovered)
    assert sum(root.parent_id in jobs_of(spans) for root in roots) == 4
    ends = {span.attributes.get(names.END) for span in spans if is_model(span.of_trace())}
    assert ends >= {"answered", "cancelled"}
    assert "lost" in {s.attributes.get(names.END) for s in spans if s.name == names.SPAN_BATCH}
