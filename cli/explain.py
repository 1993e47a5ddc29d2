"""`sluice explain`, `trace` and `feedback`: the decisions about a request, where its time went, and its grade."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from typer import Argument, Option

from cli import options, output
from sluice.client import Client
from sluice.errors import RecordUnknown
from sluice.v1.admin_pb2 import GetRequestRecordResponse, RequestRecord
from sluice.v1.inference_pb2 import FinishReason
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

RequestId = Annotated[str, Argument(help="Id of a request, or of its trace.", metavar="ID")]
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}", re.IGNORECASE)
_RECORD_WAITS_S: Final = (0.1, 0.2)
"""Waits before looking again, in seconds. Records are coalesced for 0.1 s after the end of a request."""
_SUMS: Final = ("total", "time_to_first_token")
"""The times that are no hops: they overlap the hops."""
_ROUNDED_MS: Final = 0.01
"""Rest of the total that is due to rounding, in milliseconds."""
_BAR: Final = 48
"""Width of the longest bar: a line has 80 columns."""


@dataclass(frozen=True)
class Hop:
    """A part of the request's time, in milliseconds; `start_ms` is where its bar begins.

    Hops are drawn one after the other, though batch and delivery are times of both directions.
    """

    name: str
    start_ms: float
    ms: float


def explain(
    *,
    request_id: RequestId,
    audit: bool = Option(False, "--audit", help="Show the audit entry, which is kept longer."),
    client: options.OperatorClient,
) -> None:
    """Show the decisions about a request: route, batch, cost.

    Records hold no text of prompts and answers.
    """
    from google.protobuf.json_format import MessageToDict

    reply = client.audit(_request_id(client, request_id)) if audit else look_up(client, request_id)
    output.show(MessageToDict(reply, preserving_proto_field_name=True))


def feedback(
    *,
    request_id: RequestId,
    grade: float = Argument(..., help="0 is useless, 1 is right."),
    client: options.OperatorClient,
) -> None:
    """Grade an answer. A later grade of the same request replaces an earlier one."""
    request_id = _request_id(client, request_id)
    client.feedback(request_id, grade)
    output.show({"request_id": request_id, "grade": grade})


def trace(request_id: RequestId, client: options.OperatorClient) -> None:
    """Show where the time of a request went.

    A bar for each hop; then the tokens, the batch and the wait of each model.
    """
    record = look_up(client, request_id).record
    output.show(trace_object(record), "\n".join(trace_lines(record)))


def look_up(client: Client, name: str) -> GetRequestRecordResponse:
    """Return the record of the request, or the trace, called `name`; one that has just ended is waited for."""
    request_id, trace_id = ("", name.lower()) if _TRACE_ID.fullmatch(name) else (name, "")
    for wait_s in _RECORD_WAITS_S:
        try:
            return client.explain(request_id, trace_id=trace_id)
        except RecordUnknown:
            time.sleep(wait_s)
    return client.explain(request_id, trace_id=trace_id)


def _request_id(client: Client, name: str) -> str:
    """Return the id of the request, where `name` may be that of its trace."""
    return look_up(client, name).record.request_id if _TRACE_ID.fullmatch(name) else name


def trace_object(record: RequestRecord) -> dict[str, object]:
    """Describe where the time of a request went, for `--json`."""
    return {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "total_ms": ms_of(record.timings.total),
        "hops": [vars(hop) for hop in waterfall(record)],
    }


def waterfall(record: RequestRecord) -> list[Hop]:
    """Return the hops of a request in the order of `Timings`, then "other", the rest; empty without timings."""
    if not record.HasField("timings"):
        return []
    hops, at_ms = list[Hop](), 0.0
    for field in record.timings.DESCRIPTOR.fields:
        if field.name not in _SUMS:
            ms = ms_of(getattr(record.timings, field.name))
            hops.append(Hop(field.name, at_ms, ms))
            at_ms += ms
    rest_ms = ms_of(record.timings.total) - at_ms
    return [*hops, Hop("other", at_ms, rest_ms)] if rest_ms > _ROUNDED_MS else hops


def trace_lines(record: RequestRecord) -> Iterator[str]:
    """Draw where the time of a request went; bars end within 80 columns."""
    hops = waterfall(record)
    end = record.error_reason or word_of(FinishReason, record.finish_reason)
    yield f"{record.request_id}: {end}; trace {record.trace_id}"
    total_ms = max(ms_of(record.timings.total), sum(hop.ms for hop in hops))
    scale = _BAR / total_ms if total_ms else 0.0
    for hop in hops:
        bar = "#" * round(hop.ms * scale) or "|"
        yield f"{hop.name:9}{hop.ms:9.1f} ms  {' ' * round(hop.start_ms * scale)}{bar}"
    if hops:
        first_ms = ms_of(record.timings.time_to_first_token)
        yield f"{'total':9}{total_ms:9.1f} ms  first token after {first_ms:.1f} ms"
    for attempt in record.attempts:
        yield f"{attempt.model}: {attempt.prompt_tokens} + {attempt.completion_tokens} tokens"
        if attempt.batch_id:
            batch = f"{attempt.batch_id} of {attempt.batch_rows} ({attempt.batch_cause})"
            yield f"  waited {ms_of(attempt.queue_wait):.1f} ms for batch {batch}"
        if attempt.escalation_reason:
            yield f"  then another model: {attempt.escalation_reason}"
