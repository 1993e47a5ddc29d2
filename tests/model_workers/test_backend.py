"""The worker inside a real Triton: an echo and a tiny Llama in one server, asked over raw stubs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from model_workers.engine.checkpoint import load_engine
from model_workers.engine.protocol import Sampling
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.settings import ModelSettings
from sluice.telemetry import names
from tests.support.otlp import OtlpReceiver, otlp_receiver
from tests.support.sequences import batch, drive, open_channel, sequence_spec, wire_row
from tests.support.tiny_models import CONTEXT, save_model
from tests.support.triton import TritonServer, WorkerClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO, TINY = "echo", "tiny"
LONG = 1_000_000
ECHO_MODEL = ModelSettings(name=ECHO, path=".", engine="echo", context_tokens=2 * LONG)
MALFORMED = (b"\xff\xff\xff", b"", open_channel("").SerializeToString())
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True)
class Served:
    """A running server with what belongs to it."""

    address: str
    spans: OtlpReceiver
    tiny: ModelSettings


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("backend")
    tiny = ModelSettings(name=TINY, path=str(save_model(folder / "tiny")), device="cpu")
    async with otlp_receiver() as spans:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": spans.grpc_endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        server = TritonServer(folder, (ECHO_MODEL, tiny), environment)
        try:
            await server.start()
            yield Served(server.address, spans, tiny)
        finally:
            server.kill()


@dataclass
class Batcher:
    """A batcher with its open channel, whose reports it reads when it waits for something."""

    name: str
    client: WorkerClient
    unread: AsyncIterator[worker_pb2.StepReport]
    reports: list[worker_pb2.StepReport] = field(default_factory=list)

    @property
    def frames(self) -> list[frame_pb2.Frame]:
        return [frame for report in self.reports for frame in report.frames]

    @property
    def ends(self) -> dict[str, int]:
        return {f.request_id: f.final.end for f in self.frames if f.HasField("final")}

    def tokens(self, request_id: str) -> list[int]:
        return [t for f in self.frames if f.request_id == request_id for t in f.token_ids]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Reads reports, which must be numbered, until the condition holds."""
        while not condition():
            report = await asyncio.wait_for(anext(self.unread), 30.0)
            assert report.sequence == len(self.reports)
            self.reports.append(report)

    async def ask(self, *rows: worker_pb2.BatchedTask) -> None:
        """Sends a batch, and returns when the engine has taken all its rows."""
        batch_id = rows[0].task.request_id
        await self.client.ask(batch(rows, self.name, batch_id))

        def admissions() -> list[worker_pb2.Admission]:
            found = [a for report in self.reports for a in report.admissions]
            return [a for a in found if a.batch_id == batch_id]

        await self.until(lambda: bool(admissions()))
        assert not admissions()[0].refused


@asynccontextmanager
async def opened(served: Served, model: str, name: str) -> AsyncIterator[Batcher]:
    """A channel from its first heartbeat to its cancel."""
    async with WorkerClient(served.address, model) as client, client.stream() as stream:
        await stream.send(open_channel(name, 50))
        batcher = Batcher(name, client, stream.reports())
        await batcher.until(lambda: any(report.ready for report in batcher.reports))
        yield batcher


async def test_a_channel_opens_with_a_heartbeat_and_goes_on_beating(served: Served) -> None:
    async with opened(served, TINY, "beats") as batcher:
        await batcher.until(lambda: len(batcher.reports) > 3)
    assert len({report.worker for report in batcher.reports}) == 1
    load = batcher.reports[-1].load
    assert (load.slots, load.running, load.waiting, load.context_tokens) == (32, 0, 0, CONTEXT)


async def test_64_tasks_in_32_slots_answer_as_alone(served: Served) -> None:
    prompts = {f"r{i}": [i, 3 * i % 97, 7] + [5] * (i % 9) for i in range(64)}
    async with opened(served, TINY, "many") as batcher:
        for half in (list(prompts)[:32], list(prompts)[32:]):
            await batcher.ask(*(wire_row(name, prompts[name], max_tokens=12) for name in half))
        await batcher.until(lambda: batcher.ends.keys() == prompts.keys())
    assert set(batcher.ends.values()) == {frame_pb2.TASK_END_LENGTH}
    alone = load_engine(served.tiny)
    for name in ("r0", "r13", "r40", "r63"):
        expected = drive(alone, sequence_spec(name, prompts[name], Sampling(12)))
        assert batcher.tokens(name) == expected.tokens[name]


async def test_a_malformed_request_is_refused_and_nothing_else_changes(served: Served) -> None:
    for payload in MALFORMED * 4:
        async with WorkerClient(served.address, ECHO) as client, client.stream() as stream:
            await stream.send_bytes(payload)
            await stream.half_close()
            (report,) = [report async for report in stream.reports()]
            assert report == worker_pb2.StepReport(refused=report.refused)
            assert report.refused
            # Triton 2.51 sometimes dies when a request ends with its own error (docs/internals/notes-triton.md).
            assert await stream.code() is grpc.StatusCode.OK
    async with opened(served, ECHO, "after") as batcher:
        await batcher.ask(wire_row("r", max_tokens=1))


async def test_rows_of_a_batcher_that_has_gone_leave_the_engine(served: Served) -> None:
    async with opened(served, ECHO, "goes") as batcher:
        await batcher.ask(wire_row("left-behind", max_tokens=LONG))
    async with opened(served, ECHO, "stays") as other:
        await other.until(lambda: not other.reports[-1].load.running)


async def test_prefill_and_decode_are_spans_under_the_rows_context(served: Served) -> None:
    async with opened(served, TINY, "traced") as batcher:
        await batcher.ask(wire_row("traced", [1, 2, 3], max_tokens=5, traceparent=PARENT))
        await batcher.until(lambda: "traced" in batcher.ends)
    trace_id, parent_id = PARENT.split("-")[1:3]
    await served.spans.wait_for(lambda spans: sum(span.trace_id == trace_id for span in spans) == 2)
    spans = {span.name: span for span in served.spans.spans.of_trace(trace_id)}
    assert set(spans) == {names.SPAN_PREFILL, names.SPAN_DECODE}
    assert {span.parent_id for span in spans.values()} == {parent_id}
    assert {span.service for span in spans.values()} == {names.SERVICE_WORKER}


async def test_broken_model_folder_ends_the_server_with_one_line(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    (folder / "config.json").unlink()
    server = TritonServer(tmp_path, (ModelSettings(name=TINY, path=str(folder)),))
    with pytest.raises(AssertionError, match=r"config\.json is missing"):
        await server.start()
    server.kill()
