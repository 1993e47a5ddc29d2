"""One trace per request: who emits which span, every parent edge, every link (sluice/telemetry/names.py).

Triton 2.51 loses the context of some streams (docs/internals/notes-triton.md), so its own spans are asked for until
they come.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import grpc
import pytest

from cli.trace_rules import faults
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.mesh import RunningMesh
from tests.support.spans import SpanRecord

pytestmark = pytest.mark.mesh

Name = tuple[str, str]
"""A span by service and name."""

GENERATE: Name = (names.SERVICE_GATEWAY, names.SPAN_GENERATE)
ATTEMPT: Name = (names.SERVICE_GATEWAY, "chat small")
TASK: Name = (names.SERVICE_BATCHER, names.SPAN_TASK)
BATCH: Name = (names.SERVICE_BATCHER, names.SPAN_BATCH)

PARENTS: dict[Name, Name] = {
    (names.SERVICE_GATEWAY, names.SPAN_SAFETY): GENERATE,
    (names.SERVICE_GATEWAY, names.SPAN_ROUTE): GENERATE,
    (names.SERVICE_GATEWAY, names.SPAN_TOKENIZE): GENERATE,
    ATTEMPT: GENERATE,
    TASK: ATTEMPT,  # over NATS
    (names.SERVICE_BATCHER, names.SPAN_QUEUE): TASK,
    BATCH: TASK,
    (names.SERVICE_WORKER, names.SPAN_PREFILL): BATCH,  # over Triton
    (names.SERVICE_WORKER, names.SPAN_DECODE): BATCH,
}
"""Every span of a request but Triton's, by its parent."""

WAIT_S = 60.0
TRITON_WAIT_S = 2.0
"""Triton sends a finished span after 0.5 s."""
TIMEOUT_S = 60.0
CONCURRENT = 8
ROUNDS = 5
TRITON_TRIES = 15


async def ask(
    mesh: RunningMesh, prompt: str, metadata: tuple[tuple[str, str], ...] = ()
) -> pb.Started:
    """Reads one whole answer; returns its first event."""
    request = pb.GenerateRequest(
        prompt=prompt, model="small", sampling=pb.SamplingParams(max_tokens=8)
    )
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        call = InferenceServiceStub(channel).Generate(request, timeout=TIMEOUT_S, metadata=metadata)
        events = [event async for event in call]
    assert events[-1].HasField("finished")
    return events[0].started


async def finished_traces(
    mesh: RunningMesh, trace_ids: Iterable[str]
) -> dict[str, list[SpanRecord]]:
    """The spans of each trace once all that must come have come."""
    wanted = set(trace_ids)

    def complete(spans: Sequence[SpanRecord]) -> bool:
        ours = [span for span in spans if span.trace_id in wanted]
        seen = {trace_id: set[Name]() for trace_id in wanted}
        for span in ours:
            seen[span.trace_id].add(name_of(span))
        return all(found >= {GENERATE, *PARENTS} for found in seen.values())

    await mesh.otlp.wait_for(complete, WAIT_S)
    return {trace_id: mesh.otlp.spans.of_trace(trace_id) for trace_id in wanted}


async def trace_with_triton(mesh: RunningMesh) -> list[SpanRecord]:
    """The spans of a request whose batch kept its context inside of Triton."""
    for number in range(TRITON_TRIES):
        trace_id = (await ask(mesh, f"classify: wrong colour, order {number}")).trace_id
        await finished_traces(mesh, [trace_id])

        def has_come(spans: Sequence[SpanRecord], trace_id: str = trace_id) -> bool:
            found = {span.name for span in spans if is_of_triton(span, trace_id)}
            return found >= {"InferRequest", "compute"}

        with contextlib.suppress(TimeoutError):
            await mesh.otlp.wait_for(has_come, TRITON_WAIT_S)
            return mesh.otlp.spans.of_trace(trace_id)
    raise AssertionError(f"no spans of Triton in {TRITON_TRIES} requests")


def is_of_triton(span: SpanRecord, trace_id: str) -> bool:
    return span.service == names.SERVICE_TRITON and span.trace_id == trace_id


def name_of(span: SpanRecord) -> Name:
    return span.service, span.name


def the(spans: Iterable[SpanRecord], name: Name) -> SpanRecord:
    """The only span of that name."""
    found = [span for span in spans if name_of(span) == name]
    assert len(found) == 1, f"{name}: {len(found)} spans"
    return found[0]


def assert_parents(spans: Sequence[SpanRecord]) -> None:
    assert not faults([span.of_trace() for span in spans])
    by_id = {span.span_id: span for span in spans}
    for name, parent in PARENTS.items():
        span = the(spans, name)
        assert span.parent_id in by_id, f"{name} has no parent in its trace"
        assert name_of(by_id[span.parent_id]) == parent, name


@pytest.mark.parametrize("caller", ["", "00f067aa0ba902b7"])
async def test_spans_of_a_request_have_the_right_parents(mesh: RunningMesh, caller: str) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    metadata = (("traceparent", f"00-{trace_id}-{caller}-01"),) if caller else ()

    started = await ask(mesh, "classify: my parcel is late", metadata)

    assert not caller or started.trace_id == trace_id
    spans = (await finished_traces(mesh, [started.trace_id]))[started.trace_id]
    assert the(spans, GENERATE).parent_id == caller
    assert_parents(spans)
    for name in (ATTEMPT, TASK):
        assert the(spans, name).attributes[names.MESSAGING_SYSTEM] == "nats"


async def test_tritons_spans_are_children_of_the_first_attempt(mesh: RunningMesh) -> None:
    spans = await trace_with_triton(mesh)

    batch = the(spans, BATCH)
    triton = {span.span_id: span for span in spans if span.service == names.SERVICE_TRITON}
    tops = [span for span in triton.values() if span.parent_id not in triton]
    assert [span.name for span in tops] == ["InferRequest"]
    assert tops[0].parent_id == the(spans, ATTEMPT).span_id
    assert batch.links == (the(spans, ATTEMPT).key,)
    assert_parents(spans)
    assert {span.service for span in spans} == {
        names.SERVICE_GATEWAY,
        names.SERVICE_BATCHER,
        names.SERVICE_WORKER,
        names.SERVICE_TRITON,
    }


async def test_batches_and_their_rows_are_linked_both_ways(mesh: RunningMesh) -> None:
    """Asks again until some requests shared a batch, which is up to the moment they arrive."""
    for _ in range(ROUNDS):
        prompts = [f"classify: order {number} is missing" for number in range(CONCURRENT)]
        started = await asyncio.gather(*(ask(mesh, prompt) for prompt in prompts))
        traces = await finished_traces(mesh, [event.trace_id for event in started])
        assert len(traces) == CONCURRENT
        for spans in traces.values():
            assert_parents(spans)
        if max(assert_links(list(traces.values()))) > 1:
            return
    raise AssertionError(f"{ROUNDS} times {CONCURRENT} requests never shared a batch")


def assert_links(traces: Sequence[Sequence[SpanRecord]]) -> list[int]:
    """Checks every batch of these requests; returns their numbers of rows."""
    rows_of: dict[str, list[tuple[SpanRecord, SpanRecord]]] = defaultdict(list)
    for spans in traces:
        batch, attempt = the(spans, BATCH), the(spans, ATTEMPT)
        rows_of[str(batch.attributes[names.BATCH_ID])].append((batch, attempt))
    for rows in rows_of.values():
        attempts = {attempt.key for _, attempt in rows}
        ((owner, first),) = (row for row in rows if set(row[0].links) == attempts)
        for batch, _ in rows:
            assert batch.attributes[names.BATCH_ROWS] == len(rows)
            assert batch is owner or batch.links == (first.key,)
    return [len(rows) for rows in rows_of.values()]
