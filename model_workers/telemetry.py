"""Telemetry of a worker's sequences: the batcher, the times and the spans of each."""

import math
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from model_workers.engine.protocol import SequenceEnd, SequenceSpec, SequenceStep
from sluice.errors import EngineFailed
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.telemetry import names
from sluice.telemetry.catalog import METRICS
from sluice.telemetry.tracing import TRACEPARENT, context_of, is_unsampled_parent

_STEP_SECONDS: Final = METRICS["sluice.worker.step.duration"].bounds
REPLACED: Final = "replaced"
"""End of a sequence that a higher attempt has replaced."""


@dataclass
class SequenceTimes:
    """One sequence. Times are monotonic seconds."""

    spec: SequenceSpec
    accepted_at: float
    first_at: float | None = None
    tokens: int = 0


class SequenceTelemetry:
    """Telemetry of the sequences in the engine, by request. Used only by the engine's thread.

    Attributes:
        counts: Totals since the start, for batchers, which export them as metrics. The engine's thread writes them.
    """

    def __init__(self, tracer: Tracer, model: str, worker: str) -> None:
        self._tracer = tracer
        self._common: dict[str, AttributeValue] = {
            names.WORKER_ID: worker,
            names.GEN_AI_RESPONSE_MODEL: model,
        }
        self._sequences: dict[str, SequenceTimes] = {}
        self.counts = worker_pb2.WorkerCounts(
            step_buckets=[0] * (len(_STEP_SECONDS) + 1), shortest_step_s=math.inf
        )

    def count_step(self, lasted_s: float) -> None:
        """Count a step of the engine."""
        counts = self.counts
        counts.step_s += lasted_s
        counts.shortest_step_s = min(counts.shortest_step_s, lasted_s)
        counts.longest_step_s = max(counts.longest_step_s, lasted_s)
        counts.step_buckets[bisect_left(_STEP_SECONDS, lasted_s)] += 1

    def accept(self, spec: SequenceSpec, now: float) -> SequenceTimes | None:
        """Add a sequence; return the one of a lower attempt that it replaces."""
        old = self._sequences.get(spec.request_id)
        if old is not None:
            self._record(old, now, REPLACED)
        self._sequences[spec.request_id] = SequenceTimes(spec, now)
        return old

    @property
    def batches(self) -> int:
        """Number of batches with a sequence in the engine."""
        return len({sequence.spec.batch for sequence in self._sequences.values()})

    def owners(self) -> Iterator[str]:
        """Yield the batcher of each sequence."""
        return (sequence.spec.owner for sequence in self._sequences.values())

    def owned(self, owner: str, before: float = math.inf) -> list[SequenceSpec]:
        """Return the sequences of a batcher that were accepted before a time."""
        return [
            sequence.spec
            for sequence in self._sequences.values()
            if sequence.spec.owner == owner and sequence.accepted_at < before
        ]

    def add_step(self, step: SequenceStep, now: float) -> frame_pb2.TaskTimings | None:
        """Count a step of a sequence; return its timings if the sequence has ended."""
        sequence = self._sequences[step.request_id]
        counts = self.counts
        if step.token_ids:
            sequence.tokens += len(step.token_ids)
            counts.tokens += len(step.token_ids)
            counts.step_tasks += 1
            if sequence.first_at is None:
                sequence.first_at = now
        if step.end is None:
            return None
        counts.prompt_tokens += len(sequence.spec.prompt)
        counts.cached_tokens += step.cached_prompt_tokens
        del self._sequences[step.request_id]
        self._record(
            sequence,
            now,
            step.end.name.lower(),
            failed=step.end in (SequenceEnd.FAILED, SequenceEnd.RETURNED),
        )
        first_at = now if sequence.first_at is None else sequence.first_at
        return frame_pb2.TaskTimings(
            prefill_ms=(first_at - sequence.accepted_at) * 1000, decode_ms=(now - first_at) * 1000
        )

    def _record(
        self, sequence: SequenceTimes, now: float, end: str, *, failed: bool = False
    ) -> None:
        spec, first_at = sequence.spec, sequence.first_at
        if is_unsampled_parent(spec.traceparent):
            return
        prefill_end = now if first_at is None else first_at
        about: dict[str, AttributeValue] = {
            names.INPUT_TOKENS: len(spec.prompt) + len(spec.produced)
        }
        failed_in_prefill = failed and first_at is None
        self._span(
            names.SPAN_PREFILL, spec, (sequence.accepted_at, prefill_end), about, failed_in_prefill
        )
        if first_at is not None:
            about = {names.OUTPUT_TOKENS: sequence.tokens, names.GEN_AI_FINISH_REASONS: [end]}
            self._span(names.SPAN_DECODE, spec, (first_at, now), about, failed)

    def _span(
        self,
        name: str,
        spec: SequenceSpec,
        times: tuple[float, float],
        about: dict[str, AttributeValue],
        failed: bool,
    ) -> None:
        offset_ns = _wall_offset_ns()
        start_ns, end_ns = (offset_ns + int(at * 1e9) for at in times)
        about |= {names.REQUEST_ID: spec.request_id, names.ATTEMPT: spec.attempt}
        span = self._tracer.start_span(
            name,
            context_of({TRACEPARENT: spec.traceparent}),
            attributes={**self._common, **about},
            start_time=start_ns,
        )
        if failed:
            span.set_attribute(names.ERROR_REASON, EngineFailed.reason)
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)


def _wall_offset_ns() -> int:
    """Return how far the wall clock is ahead of the monotonic clock, in nanoseconds.

    A thread that is suspended between the two readings sees too little, up to 10 ms on a busy core. So the largest of
    three readings is right.
    """
    return max(time.time_ns() - time.monotonic_ns() for _ in range(3))
