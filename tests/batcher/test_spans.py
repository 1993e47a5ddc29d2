"""The batcher's spans: parents, links and attributes, as sluice/telemetry/names.py promises them."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from typing_extensions import override

from batcher.core.requests import Actions
from batcher.spans import RequestSpans
from sluice.internal.v1.frame_pb2 import TASK_END_STOP
from sluice.telemetry import names
from tests.batcher.core.desk import WORKER, Desk

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def traceparent(sender: str = PARENT, sampled: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{sender}-{sampled}"}


class Scene(Desk):
    """A request table whose moves make spans."""

    def __init__(self) -> None:
        super().__init__()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = RequestSpans(provider.get_tracer("test"))
        self.traceparents: list[str] = []
        self.report()

    @override
    def add(self, name: str = "r", headers: Mapping[str, str] | None = None, **fields: Any) -> None:
        super().add(name, headers or traceparent(), **fields)

    @override
    def decide(self) -> Actions:
        actions = super().decide()
        for request in actions.added:
            self.spans.on_added(request)
        for batch in actions.batches:
            self.traceparents = self.spans.on_batch(batch)
        for request in actions.ended:
            self.spans.on_ended(request)
        return actions

    def end(self, *requests: str, attempt: int = 0) -> None:
        for name in requests:
            self.step(name, 0, 2, attempt=attempt, end=TASK_END_STOP)
            self.advance()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A scene whose spans all end."""
    made = Scene()
    yield made
    made.spans.close()


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def parent(span: ReadableSpan) -> tuple[int, int]:
    assert span.parent is not None
    return span.parent.trace_id, span.parent.span_id


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def test_the_task_span_hangs_under_the_context_of_the_message(scene: Scene) -> None:
    scene.run("r")
    scene.end("r")
    (task,) = scene.named(names.SPAN_TASK)
    assert task.kind is SpanKind.CONSUMER
    assert parent(task) == (int(TRACE, 16), int(PARENT, 16))
    found = attributes(task)
    assert found[names.REQUEST_ID] == "r"
    assert found[names.MESSAGING_TEMPLATE] == "sluice.batchers.*.task"
    assert found[names.OUTPUT_TOKENS] == 2
    assert found[names.GEN_AI_FINISH_REASONS] == ("stop",)


def test_batch_span_of_the_first_request_links_all_members(scene: Scene) -> None:
    senders = {"one": f"{1:016x}", "two": f"{2:016x}", "three": f"{3:016x}"}
    for name, sender in senders.items():
        scene.add(name, traceparent(sender))
    scene.send()
    scene.end(*senders)
    tasks, batches = scene.named(names.SPAN_TASK), scene.named(names.SPAN_BATCH)
    own, *others = batches
    assert links(own) == [(int(TRACE, 16), int(sender, 16)) for sender in senders.values()]
    assert all(links(other) == links(own)[:1] for other in others)
    for task, batch, queue in zip(tasks, batches, scene.named(names.SPAN_QUEUE), strict=True):
        assert parent(batch) == parent(queue) == ids(task)
    own_trace, *engine_traces = scene.traceparents
    assert own_trace == traceparent(senders["one"])["traceparent"]
    assert [one[36:52] for one in engine_traces] == [f"{ids(batch)[1]:016x}" for batch in batches]
    expected = {
        names.BATCH_ROWS: 3,
        names.BATCH_CAUSE: "worker_idle",
        names.BATCH_LIMIT: "all_waiting",
        names.WORKER_ID: WORKER,
    }
    assert expected.items() <= attributes(own).items()


def test_span_of_a_request_whose_worker_was_lost(scene: Scene) -> None:
    scene.run("r")
    scene.table.on_lost(WORKER, scene.now)
    scene.add("r", attempt=1)
    scene.send()
    scene.end("r", attempt=1)
    first, second = scene.named(names.SPAN_BATCH)
    assert (first.status.status_code, second.status.status_code) == (
        StatusCode.ERROR,
        StatusCode.UNSET,
    )
    assert (attributes(first)[names.END], attributes(second)[names.END]) == ("lost", "answered")
    assert attributes(second)[names.ATTEMPT] == 1
    assert len(scene.named(names.SPAN_QUEUE)) == 2
    ends = [attributes(task)[names.GEN_AI_FINISH_REASONS] for task in scene.named(names.SPAN_TASK)]
    assert ends == [("returned",), ("stop",)]


def test_what_is_returned_or_cancelled_leaves_no_span_open(scene: Scene) -> None:
    scene.add("waits")
    scene.add("gone")
    scene.cancel("gone")
    scene.table.drain(scene.now)
    scene.add("new")
    scene.advance()
    assert len(scene.named(names.SPAN_TASK)) == 3
    scene.spans.close()
    assert len(scene.named(names.SPAN_TASK)) == 3, "none was open"


def test_rows_that_their_gateway_did_not_sample_have_no_spans(scene: Scene) -> None:
    unsampled = traceparent(sampled="00")
    scene.add("r1", unsampled)
    scene.send()
    assert scene.traceparents == ["", unsampled["traceparent"]], "the batch is not traced"
    scene.add("r2", unsampled)
    scene.add("r3")
    scene.send()
    own, first, second = scene.traceparents
    assert first == unsampled["traceparent"]
    assert all(one.startswith(f"00-{TRACE}-") for one in (own, second))
    scene.end("r1", "r2", "r3")
    assert [len(scene.named(name)) for name in (names.SPAN_TASK, names.SPAN_BATCH)] == [1, 1]
