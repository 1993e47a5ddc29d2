"""`sluice trace`: where the time of one request went, from its record; no Jaeger is needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cli import options, output
from cli.explain import RequestId
from sluice.v1.admin_pb2 import RequestRecord
from sluice.v1.inference_pb2 import FinishReason
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

_HOPS: Final = ("safety", "route", "tokenize", "queue", "batch", "prefill", "decode")
"""In the order in which they follow each other; publishing happens beside the queue."""
_BAR: Final = 48
"""Width of the longest bar: a line has 80 columns."""


@dataclass(frozen=True)
class Hop:
    """A part of the request's time, milliseconds from its arrival on."""

    name: str
    start_ms: float
    ms: float


def trace(request_id: RequestId, client: options.OperatorClient) -> None:
    """Show where the time of a request went: a bar for each step, its batch, and what it waited for."""
    record = client.explain(request_id).record
    hops = waterfall(record)
    described = {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "total_ms": ms_of(record.timings.total),
        "hops": [vars(hop) for hop in hops],
    }
    output.show(described, "\n".join(_lines(record, hops)))


def waterfall(record: RequestRecord) -> list[Hop]:
    """The steps of a request one after another, and what else it took; empty without timings."""
    if not record.HasField("timings"):
        return []
    hops, at_ms = list[Hop](), 0.0
    for name in _HOPS:
        ms = ms_of(getattr(record.timings, name))
        hops.append(Hop(name, at_ms, ms))
        at_ms += ms
    rest_ms = ms_of(record.timings.total) - at_ms
    return [*hops, Hop("other", at_ms, rest_ms)] if rest_ms > 0 else hops


def _lines(record: RequestRecord, hops: list[Hop]) -> Iterator[str]:
    end = record.error_reason or word_of(FinishReason, record.finish_reason)
    yield f"{record.request_id}: {end}; trace {record.trace_id}"
    total_ms = max(ms_of(record.timings.total), sum(hop.ms for hop in hops))
    for hop in hops:
        start = round(hop.start_ms / total_ms * _BAR) if total_ms else 0
        width = round(hop.ms / total_ms * _BAR) if total_ms else 0
        bar = f"{' ' * start}{'#' * width or '|'}"
        yield f"{hop.name:9}{hop.ms:9.1f} ms  {bar}"
    if hops:
        first_ms = ms_of(record.timings.time_to_first_token)
        yield f"{'total':9}{total_ms:9.1f} ms  first token after {first_ms:.1f} ms"
    for attempt in record.attempts:
        yield f"{attempt.model}: {attempt.prompt_tokens} + {attempt.completion_tokens} tokens"
        if attempt.batch_id:
            yield (
                f"  with {attempt.batch_rows - 1} others in {attempt.batch_id} ({attempt.batch_cause});"
                f" waited {ms_of(attempt.queue_wait):.1f} ms"
            )
        if attempt.escalation_reason:
            yield f"  then another model: {attempt.escalation_reason}"
