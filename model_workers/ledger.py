"""What a worker knows of its rows beside the engine: whose they are, when what happened, and their spans."""

import math
import time
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from model_workers.engine.protocol import RowEnd, RowSpec, RowStep
from sluice.internal.v1 import frame_pb2
from sluice.telemetry import names
from sluice.telemetry.tracing import TRACEPARENT, context_of

REPLACED: Final = "replaced"


@dataclass
class Entry:
    """One row. Times are monotonic seconds."""

    spec: RowSpec
    traceparent: str
    accepted_at: float
    first_at: float | None = None
    tokens: int = 0


class Ledger:
    """The rows in the engine, by request. Belongs to the engine's thread."""

    def __init__(self, tracer: Tracer, model: str, worker: str) -> None:
        self._tracer = tracer
        self._common: dict[str, AttributeValue] = {
            names.WORKER_ID: worker,
            names.GEN_AI_RESPONSE_MODEL: model,
        }
        self._entries: dict[str, Entry] = {}

    def accept(self, spec: RowSpec, traceparent: str, now: float) -> None:
        """The engine took a row; one of a lower attempt is over."""
        old = self._entries.get(spec.request_id)
        if old is not None:
            self._record(old, now, REPLACED)
        self._entries[spec.request_id] = Entry(spec, traceparent, now)

    def owned(self, owner: str, before: float = math.inf) -> list[str]:
        """Requests of one batcher that were accepted before a moment."""
        return [
            request_id
            for request_id, entry in self._entries.items()
            if entry.spec.owner == owner and entry.accepted_at < before
        ]

    def note(self, step: RowStep, now: float) -> frame_pb2.RowTimings | None:
        """A step happened to a row; its times when it has ended."""
        entry = self._entries[step.request_id]
        entry.tokens += len(step.token_ids)
        if step.token_ids and entry.first_at is None:
            entry.first_at = now
        if step.end is None:
            return None
        del self._entries[step.request_id]
        self._record(entry, now, step.end.name.lower(), failed=step.end is RowEnd.FAILED)
        first_at = now if entry.first_at is None else entry.first_at
        return frame_pb2.RowTimings(
            prefill_ms=(first_at - entry.accepted_at) * 1000, decode_ms=(now - first_at) * 1000
        )

    def _record(self, entry: Entry, now: float, end: str, *, failed: bool = False) -> None:
        prefill_end = now if entry.first_at is None else entry.first_at
        tokens_in = len(entry.spec.prompt) + len(entry.spec.produced)
        self._span(
            names.SPAN_PREFILL,
            entry,
            (entry.accepted_at, prefill_end),
            {names.GEN_AI_INPUT_TOKENS: tokens_in},
            failed and entry.first_at is None,
        )
        if entry.first_at is not None:
            about: dict[str, AttributeValue] = {
                names.GEN_AI_OUTPUT_TOKENS: entry.tokens,
                names.GEN_AI_FINISH_REASONS: [end],
            }
            self._span(names.SPAN_DECODE, entry, (entry.first_at, now), about, failed)

    def _span(
        self,
        name: str,
        entry: Entry,
        times: tuple[float, float],
        about: dict[str, AttributeValue],
        failed: bool,
    ) -> None:
        start_ns, end_ns = (_unix_ns(at) for at in times)
        span = self._tracer.start_span(
            name,
            context_of({TRACEPARENT: entry.traceparent}),
            attributes={
                **self._common,
                **about,
                names.REQUEST_ID: entry.spec.request_id,
                names.ATTEMPT: entry.spec.attempt,
            },
            start_time=start_ns,
        )
        if failed:
            span.set_attribute(names.ERROR_REASON, "ENGINE_FAILED")
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)


def _unix_ns(at: float) -> int:
    """A moment of the monotonic clock on the wall clock, nanoseconds; spans are made just after their end."""
    return time.time_ns() - int((time.monotonic() - at) * 1e9)
