"""The worker inside a real Triton: an echo and a tiny Llama in one server, asked over raw stubs."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
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
from tests.support.sequences import (
    batch,
    drive,
    open_channel,
    sequence_spec,
    wire_row,
)
from tests.support.tiny_models import CONTEXT, save_model
from tests.support.triton import TritonServer, WorkerClient, WorkerStream

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


class Channel:
    """The channel of one batcher as the batcher sees it."""

    def __init__(self, stream: WorkerStream) -> None:
        self._reports = stream.reports()
        self.reports: list[worker_pb2.StepReport] = []

    @property
    def frames(self) -> list[frame_pb2.Frame]:
        return [frame for report in self.reports for frame in report.frames]

    @property
    def ends(self) -> dict[str, int]:
        return {f.request_id: f.final.end for f in self.frames if f.HasField("final")}

    def tokens(self, request_id: str) -> list[int]:
        return [t for f in self.frames if f.request_id == request_id for t in f.token_ids]

    async def read(self) -> None:
        """Takes one report, and checks its number."""
        report = await asyncio.wait_for(anext(self._reports), 30.0)
        assert report.sequence == len(self.reports)
        self.reports.append(report)

    async def wait_ready(self) -> None:
        while not (self.reports and self.reports[-1].ready):
            await self.read()

    async def admission(self, batch_id: str) -> worker_pb2.Admission:
        while not (found := [a for r in self.reports for a in r.admissions]) or (
            found[-1].batch_id != batch_id
        ):
            await self.read()
        return found[-1]

    async def wait_ends(self, request_ids: Iterable[str]) -> None:
        wanted = set(request_ids)
        while not wanted <= set(self.ends):
            await self.read()

    async def wait_tokens(self, request_id: str) -> None:
        while not self.tokens(request_id):
            await self.read()


@dataclass(frozen=True)
class Batcher:
    """A batcher: its client, and its open channel."""

    name: str
    client: WorkerClient
    stream: WorkerStream
    channel: Channel

    async def ask(self, *rows: worker_pb2.BatchedTask, traceparent: str = "") -> list[str]:
        """The rows that the engine took, of a batch named after the first."""
        batch_id = rows[0].task.request_id
        await self.client.ask(batch(rows, self.name, batch_id), traceparent)
        refused = (await self.channel.admission(batch_id)).refused
        assert all(refusal.retryable for refusal in refused)
        names = {row.task.request_id: None for row in rows}
        for refusal in refused:
            del names[refusal.request_id]
        return list(names)


class Opened:
    """``async with Opened(...) as batcher``: a channel from first heartbeat to cancel."""

    def __init__(self, address: str, model: str, name: str, heartbeat_ms: int = 100) -> None:
        self._client = WorkerClient(address, model)
        self._stream = self._client.stream()
        self._request = open_channel(name, heartbeat_ms)
        self._name = name

    async def __aenter__(self) -> Batcher:
        await self._stream.send(self._request)
        channel = Channel(self._stream)
        await channel.wait_ready()
        return Batcher(self._name, self._client, self._stream, channel)

    async def __aexit__(self, *error: object) -> None:
        await self._stream.__aexit__(*error)
        await self._client.__aexit__(*error)


async def test_a_channel_opens_with_a_heartbeat_and_goes_on_beating(served: Served) -> None:
    async with Opened(served.address, TINY, "beats", heartbeat_ms=50) as batcher:
        for _ in range(3):
            await batcher.channel.read()
        workers = {report.worker for report in batcher.channel.reports}
        load = batcher.channel.reports[-1].load
    assert len(workers) == 1
    assert (load.slots, load.running, load.waiting, load.context_tokens) == (32, 0, 0, CONTEXT)


async def test_64_tasks_in_32_slots_answer_as_alone(served: Served) -> None:
    prompts = {f"r{i}": [i, 3 * i % 97, 7] + [5] * (i % 9) for i in range(64)}
    async with Opened(served.address, TINY, "many") as batcher:
        for half in (list(prompts)[:32], list(prompts)[32:]):
            rows = [wire_row(name, prompts[name], max_tokens=12) for name in half]
            assert await batcher.ask(*rows) == half
        await batcher.channel.wait_ends(prompts)
        answers = {name: batcher.channel.tokens(name) for name in prompts}
        assert set(batcher.channel.ends.values()) == {frame_pb2.TASK_END_LENGTH}
    alone = load_engine(served.tiny)
    for name in ("r0", "r13", "r40", "r63"):
        expected = drive(alone, sequence_spec(name, prompts[name], Sampling(12)))
        assert answers[name] == expected.tokens[name]


async def test_a_malformed_request_is_refused_and_nothing_else_changes(served: Served) -> None:
    for payload in MALFORMED * 4:
        report, code = await _answered(served.address, payload)
        assert report == worker_pb2.StepReport(refused=report.refused)
        assert report.refused
        # Triton 2.51 sometimes dies when a request ends with its own error (docs/internals/notes-triton.md).
        assert code is grpc.StatusCode.OK
    async with Opened(served.address, ECHO, "after") as batcher:
        assert await batcher.ask(wire_row("r", max_tokens=1)) == ["r"]


async def _answered(address: str, payload: bytes) -> tuple[worker_pb2.StepReport, grpc.StatusCode]:
    """The only report on a stream with one request, and the code with which it ends."""
    async with WorkerClient(address, ECHO) as client, client.stream() as stream:
        await stream.send_bytes(payload)
        await stream.half_close()
        (report,) = [report async for report in stream.reports()]
        return report, await stream.code()


async def test_rows_of_a_batcher_that_has_gone_leave_the_engine(served: Served) -> None:
    async with Opened(served.address, ECHO, "goes", heartbeat_ms=50) as batcher:
        await batcher.ask(wire_row("left-behind", max_tokens=LONG))
    async with Opened(served.address, ECHO, "stays", heartbeat_ms=50) as batcher:
        while batcher.channel.reports[-1].load.running:
            await batcher.channel.read()


async def test_prefill_and_decode_are_spans_under_the_rows_context(served: Served) -> None:
    async with Opened(served.address, TINY, "traced") as batcher:
        await batcher.ask(wire_row("traced", [1, 2, 3], max_tokens=5, traceparent=PARENT))
        await batcher.channel.wait_ends(["traced"])
    trace_id, parent_id = PARENT.split("-")[1:3]
    await served.spans.wait_for(lambda spans: sum(span.trace_id == trace_id for span in spans) == 2)
    spans = {span.name: span for span in served.spans.spans.of_trace(trace_id)}
    assert set(spans) == {names.SPAN_PREFILL, names.SPAN_DECODE}
    assert {span.parent_id for span in spans.values()} == {parent_id}
    assert {span.service for span in spans.values()} == {names.SERVICE_WORKER}


async def test_broken_model_folder_ends_the_server_with_one_line(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    (folder / "config.json").unlink()
    broken = ModelSettings(name=TINY, path=str(folder))
    server = TritonServer(tmp_path, (broken,))
    with pytest.raises(AssertionError, match=r"config\.json is missing"):
        await server.start()
    server.kill()
