"""The spans of one call (sluice/telemetry/names.py lists them). Contexts are passed explicitly."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from gateway.safety.actions import Action
from sluice.errors import SluiceError
from sluice.telemetry import names
from sluice.telemetry.tracing import context_of, trace_id_of


class CallSpans:
    """The server span of one call, and the spans of its hops under it.

    Attributes:
        recorded: whether somebody will see them; else at most the server span is seen.
        unseen: stands for the hops of a call that is not recorded.
    """

    def __init__(self, tracer: Tracer, name: str, metadata: Mapping[str, str]) -> None:
        self._tracer = tracer
        self.server = tracer.start_span(name, context_of(metadata), SpanKind.SERVER)
        self._context = trace.set_span_in_context(self.server, Context())
        context = self.server.get_span_context()
        self.unseen: Span = NonRecordingSpan(context)
        self.recorded = self.server.is_recording() and context.trace_flags.sampled
        self._attempts: dict[str, Span] = {}

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return trace_id_of(self.server)

    @contextmanager
    def hop(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Iterator[Span]:
        """A span around one hop; an error that passes through is recorded."""
        span = self.start_hop(name, kind, attributes)
        try:
            yield span
        except SluiceError as error:
            fail(span, error.reason)
            raise
        finally:
            span.end()

    def start_hop(
        self, name: str, kind: SpanKind, attributes: Mapping[str, AttributeValue] | None = None
    ) -> Span:
        """The span of a hop that begins now; the caller ends it."""
        if not self.recorded:
            return self.unseen
        return self._tracer.start_span(name, self._context, kind, attributes)

    def describe(self, make: Callable[..., Mapping[str, AttributeValue]], *about: Any) -> None:
        """Gives the server span the attributes that ``make`` makes of ``about``."""
        if self.server.is_recording():
            self.server.set_attributes(make(*about))

    def start_attempt(self, row_id: str, attributes: Mapping[str, AttributeValue]) -> Span:
        """The span of a model's row, until `end_attempts`."""
        span = self.start_hop(names.SPAN_ATTEMPT, SpanKind.PRODUCER, attributes)
        if self.recorded:
            self._attempts[row_id] = span
        return span

    def end_attempts(
        self, describe: Callable[[str], tuple[Mapping[str, AttributeValue], float]]
    ) -> None:
        """The request has ended; ``describe`` a row: how it ended, and how many seconds ago."""
        for row_id, span in self._attempts.items():
            attributes, ago_s = describe(row_id)
            span.set_attributes(attributes)
            span.end(time.time_ns() - int(ago_s * 1e9))
        self._attempts.clear()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Ends the server span; an exception that passes through is recorded."""
        try:
            yield
        except BaseException as error:
            fail(self.server, _reason_of(error))
            raise
        finally:
            self.server.end()


def finding_attributes(taken: Mapping[tuple[str, Action], int]) -> dict[str, AttributeValue]:
    """Attributes for findings by rule and action: the pairs, and a count for each action."""
    if not taken:
        return {}
    pairs = sorted(f"{rule}:{action.name.lower()}" for rule, action in taken)
    counts: Counter[Action] = Counter()
    for (_, action), count in taken.items():
        counts[action] += count
    numbers = {names.FINDING_COUNT + action.name.lower(): n for action, n in counts.items()}
    return {names.FINDINGS: pairs, **numbers}


def fail(span: Span, reason: str) -> None:
    """Marks ``span`` as failed with an ErrorInfo reason."""
    span.set_attribute(names.ERROR_REASON, reason)
    span.set_status(Status(StatusCode.ERROR, reason))


def _reason_of(error: BaseException) -> str:
    if isinstance(error, SluiceError):
        return error.reason
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
