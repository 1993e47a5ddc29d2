"""The batcher's spans: parents, links and attributes, as sluice/telemetry/names.py promises them."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from batcher.core.queued_request import QueuedRequest
from batcher.core.requests import RequestTable
from batcher.metrics import BatcherMetrics
from batcher.spans import RequestSpans
from sluice.internal.v1 import frame_pb2, task_pb2, worker_pb2
from sluice.settings.batching import Policy
from sluice.telemetry import names
from sluice.telemetry.instruments import Instruments
from tests.batcher.core.room import grant

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Scene:
    """A requests whose moves make spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = RequestSpans(provider.get_tracer("test"))
        self.metrics = BatcherMetrics(Instruments())
        self.table = RequestTable("b", policy=Policy(max_rows=8))
        self.table.on_report("w", worker_pb2.StepReport(worker="w1"), 0.0)
        self.traceparents: list[str] = []

    def add(self, name: str, headers: dict[str, str] = HEADERS, attempt: int = 0) -> None:
        task = task_pb2.Task(
            request_id=name,
            gateway="g",
            model="echo",
            priority_class="bulk",
            tenant="t",
            attempt=attempt,
        )
        task.prompt_token_ids.append(1)
        self.table.add(QueuedRequest(task, 0.0, headers), 0.0)

    def advance(self, room: int = 8) -> str:
        """Plays the loop once; returns the batch that was formed."""
        grant(self.table, "w", room)
        self.table.advance(0.0)
        actions = self.table.take()
        for row in actions.added:
            self.spans.on_added(row)
        for formed in actions.batches:
            self.traceparents = self.spans.on_batch(formed)
            self.metrics.on_batch(formed, self.spans.of_request)
        for row in actions.ended:
            self.spans.on_ended(row)
        return actions.batches[0].batch_id if actions.batches else ""

    def run(self, *rows: str) -> None:
        self.advance()

    def end(self, name: str, attempt: int = 0) -> None:
        frame = frame_pb2.Frame(request_id=name, attempt=attempt, token_ids=[1, 2])
        frame.final.end = frame_pb2.TASK_END_STOP
        worker = self.table.workers.state_of("w")
        report = worker_pb2.StepReport(worker="w1", sequence=worker.next_sequence, frames=[frame])
        self.table.on_report("w", report, 0.0)
        self.advance()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A scene whose spans all end."""
    made = Scene()
    yield made
    made.spans.close()


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def test_the_task_span_hangs_under_the_context_of_the_message(scene: Scene) -> None:
    scene.add("r")
    scene.run("r")
    scene.end("r")
    (task,) = scene.named(names.SPAN_TASK)
    assert task.kind is SpanKind.CONSUMER
    assert task.parent is not None
    assert (task.parent.trace_id, task.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert task.attributes is not None
    assert task.attributes[names.REQUEST_ID] == "r"
    assert task.attributes[names.MESSAGING_TEMPLATE] == "sluice.batchers.*.task"
    assert task.attributes[names.OUTPUT_TOKENS] == 2
    assert task.attributes[names.GEN_AI_FINISH_REASONS] == ("stop",)


def test_batch_span_of_the_first_request_links_all_members(scene: Scene) -> None:
    senders = [f"{number:016x}" for number in (1, 2, 3)]
    for name, sender in zip(("one", "two", "three"), senders, strict=True):
        scene.add(name, {"traceparent": f"00-{TRACE}-{sender}-01"})
    scene.run("one", "two", "three")
    for name in ("one", "two", "three"):
        scene.end(name)
    tasks, batches = scene.named(names.SPAN_TASK), scene.named(names.SPAN_BATCH)
    own, *others = batches
    assert links(own) == [(int(TRACE, 16), int(sender, 16)) for sender in senders]
    assert all(links(other) == links(own)[:1] for other in others)
    for task, batch, queue in zip(tasks, batches, scene.named(names.SPAN_QUEUE), strict=True):
        for child in (batch, queue):
            assert child.parent is not None
            assert (child.parent.trace_id, child.parent.span_id) == ids(task)
    assert scene.traceparents[0] == f"00-{TRACE}-{senders[0]}-01"
    assert [parent[36:52] for parent in scene.traceparents[1:]] == [
        f"{ids(batch)[1]:016x}" for batch in batches
    ]
    assert own.attributes is not None
    assert own.attributes[names.BATCH_ROWS] == 3
    assert own.attributes[names.BATCH_CAUSE] == "worker_idle"
    assert own.attributes[names.BATCH_LIMIT] == "all_waiting"
    assert own.attributes[names.BATCH_PADDING_SHARE] == 0
    assert own.attributes[names.BATCH_LONGEST_WAIT_MS] == 0
    assert own.attributes[names.BATCH_LONGEST_WAIT_REQUEST] == "one"
    assert own.attributes[names.WORKER_ID] == "w1"


def test_span_of_a_request_whose_worker_was_lost(scene: Scene) -> None:
    scene.add("r")
    scene.advance()
    scene.table.on_lost("w", 0.0)
    scene.advance()
    scene.add("r", attempt=1)
    scene.run("r")
    scene.end("r", attempt=1)
    first, second = scene.named(names.SPAN_BATCH)
    assert first.status.status_code is StatusCode.ERROR
    assert second.status.status_code is StatusCode.UNSET
    assert second.attributes is not None
    assert second.attributes[names.ATTEMPT] == 1
    assert first.attributes is not None
    assert (first.attributes[names.END], second.attributes[names.END]) == ("lost", "answered")
    assert len(scene.named(names.SPAN_QUEUE)) == 2
    tasks = scene.named(names.SPAN_TASK)
    assert [span.attributes[names.GEN_AI_FINISH_REASONS] for span in tasks if span.attributes] == [
        ("returned",),
        ("stop",),
    ]


def test_what_is_returned_or_cancelled_leaves_no_span_open(scene: Scene) -> None:
    scene.add("waits")
    scene.add("gone")
    scene.table.cancel([frame_pb2.TaskRef(request_id="gone")], 0.0)
    scene.table.drain(0.0)
    scene.add("new")
    scene.advance()
    assert len(scene.named(names.SPAN_TASK)) == 3
    scene.spans.close()
    assert len(scene.named(names.SPAN_TASK)) == 3, "none was open"


def test_rows_that_their_gateway_did_not_sample_have_no_spans(scene: Scene) -> None:
    unsampled = {"traceparent": HEADERS["traceparent"][:-2] + "00"}
    scene.add("r1", unsampled)
    scene.add("r2")
    scene.run("r1", "r2")
    own, first, second = scene.traceparents
    assert first == unsampled["traceparent"]
    assert own.startswith(f"00-{TRACE}-")
    assert second.startswith(f"00-{TRACE}-")
    scene.end("r1")
    scene.end("r2")
    assert [len(scene.named(name)) for name in (names.SPAN_TASK, names.SPAN_BATCH)] == [1, 1]


def test_a_batch_without_sampled_rows_is_not_traced(scene: Scene) -> None:
    scene.add("r1", {"traceparent": HEADERS["traceparent"][:-2] + "00"})
    scene.run("r1")
    assert scene.traceparents[0] == ""
