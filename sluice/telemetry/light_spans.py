"""Spans in a part of the CPU time that those of the OpenTelemetry SDK take; all else is the SDK's.

The SDK's spans lock, copy and check every attribute, for limits that ours do not reach, and are copied when they end;
its tracer asks the sampler again for each span below one that is sampled. A span here belongs to one thread until it
has ended, has no events, and its attributes are of OTLP's types.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
)
from opentelemetry.util.types import Attributes, AttributeValue
from typing_extensions import override

UNSET: Final = Status(StatusCode.UNSET)
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)


class LightTracer(Tracer):
    """Makes `LightSpan`s with the sampler, resource and processors of ``base``."""

    def __init__(self, base: SdkTracer) -> None:
        self.base = base

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        """See `opentelemetry.trace.Tracer`. What is below a span of this process is sampled as that is."""
        base, above = self.base, trace.get_current_span(context).get_span_context()
        parent = above if above.is_valid else None
        state: TraceState | None
        if parent is not None and not parent.is_remote:
            trace_id, flags, state = parent.trace_id, parent.trace_flags, parent.trace_state
            recorded = flags.sampled
        else:
            trace_id = base.id_generator.generate_trace_id() if parent is None else parent.trace_id
            found = base.sampler.should_sample(context, trace_id, name, kind, attributes, links)
            recorded, state = found.decision is Decision.RECORD_AND_SAMPLE, found.trace_state
            flags = _SAMPLED if recorded else _UNSAMPLED
        own = SpanContext(trace_id, base.id_generator.generate_span_id(), False, flags, state)
        if not recorded:
            return NonRecordingSpan(own)
        span = LightSpan(base, name, own, parent, kind, attributes, links, start_time)
        base.span_processor.on_start(span, context)  # type: ignore[arg-type]
        return span

    @contextmanager
    @override
    def start_as_current_span(  # type: ignore[override]
        self, name: str, *about: Any, **more: Any
    ) -> Iterator[Span]:
        with trace.use_span(self.start_span(name, *about, **more), end_on_exit=True) as span:
            yield span


class LightSpan(Span, ReadableSpan):
    """A span that is recorded."""

    def __init__(
        self,
        base: SdkTracer,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: Attributes,
        links: Sequence[Link] | None,
        start_time: int | None,
    ) -> None:
        self._processor: SpanProcessor = base.span_processor
        self._own, self._values = context, dict(attributes or ())
        ReadableSpan.__init__(
            self,
            name,
            context,
            parent,
            base.resource,
            self._values,
            (),
            links or (),
            kind,
            None,
            UNSET,
            time.time_ns() if start_time is None else start_time,
            None,
            base._instrumentation_scope,
        )

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        return self._own

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        return self._end_time is None

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Until it has ended."""
        if self._end_time is None:
            self._values[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Until it has ended."""
        if self._end_time is None:
            self._values.update(attributes)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Until it has ended."""
        if self._end_time is None:
            self._status = status if isinstance(status, Status) else Status(status, description)

    def end(self, end_time: int | None = None) -> None:
        """Hands it over, once."""
        if self._end_time is None:
            self._end_time = time.time_ns() if end_time is None else end_time
            self._processor.on_end(self)

    def record_exception(self, exception: BaseException, *about: Any, **more: Any) -> None:
        """Nothing: the status says it."""

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Not here."""
        raise NotImplementedError

    def update_name(self, name: str) -> None:
        """Not here."""
        raise NotImplementedError
