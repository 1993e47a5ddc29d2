"""The rules of a trace that is whole, for `sluice traces check` and the tests of traces.

1. No span lacks its parent but the server spans of calls (their parent is the caller's) and spans of jobs. Triton's own
   are excepted: it sends them one by one, so one that is killed loses some.
2. Every link of a span leads to a span that is known, as far as its trace is known.
3. A span begins after its parent began, and ends before it ends, or lasts longer: else Jaeger takes the clocks for
   wrong. Rows that were given up are excepted: who works on them learns of it later. Shadows and Triton's own spans may
   end later: a shadow begins after the answer, and Triton's reply says only that a batch was taken.
4. The root says what one searches by: request, tenant, class, model, and finish reason or error.
5. An answer has a span of the model that gave it, and below it task, queue, batch, prefill and decode.
6. An answer that was recovered says so on its root: a worker was lost that had given tokens of it.
7. A process that is killed takes along the spans that it has not sent. So the trace of an answer that was recovered
   may lack spans of rules 1, 2 and 5: it is incomplete, not faulty.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sluice.telemetry import names

SLACK_NS: Final = 1_000_000
"""Two processes read the same clock at different moments."""
ROOTS: Final = frozenset(
    {
        *(names.SPAN_GENERATE, names.SPAN_GENERATE_BATCH, names.SPAN_JOB),
        *(names.SPAN_EMBED, names.SPAN_RERANK, names.SPAN_SCORE),
    }
)
"""Names of spans that may have no parent in their trace; calls over HTTP may lack one, too (`is_root`)."""
_SEARCHED: Final = (
    names.REQUEST_ID,
    names.TENANT,
    names.PRIORITY_CLASS,
    names.GEN_AI_REQUEST_MODEL,
)
_OF_ANSWERS: Final = (
    names.SPAN_TASK,
    names.SPAN_QUEUE,
    names.SPAN_BATCH,
    names.SPAN_PREFILL,
    names.SPAN_DECODE,
)
_CANCELLED: Final = frozenset(
    ("cancelled", "superseded", "escalated", "lost", "deadline", "deadline_exceeded")
)


@dataclass(frozen=True)
class TraceSpan:
    """One span; times are Unix nanoseconds, `links` are (trace, span)."""

    service: str
    name: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The service and the name, for messages."""
        return f"{self.service} {self.name}"


def faults(
    spans: Sequence[TraceSpan],
    known_spans: Collection[tuple[str, str]] | None = None,
    *,
    incomplete: bool = False,
) -> list[str]:
    """Return what is wrong with the spans of one trace, one line each.

    Args:
        spans: all spans of the trace.
        known_spans: every (trace, span) there is; None: links are not checked.
        incomplete: whether spans may be missing, as rule 7 says.
    """
    ids = {span.span_id for span in spans}
    tops = [
        span
        for span in spans
        if span.parent_id not in ids and not (is_root(span) or _is_triton(span))
    ]
    if not spans or (tops and not incomplete):
        return [f"spans without a parent: {', '.join(sorted(top.label for top in tops)) or 'all'}"]
    problems = list(_clock_faults(spans))
    if known_spans is not None and not incomplete:
        lost = (span for span in spans for link in span.links if link not in known_spans)
        problems += [f"{span.label}: a link leads nowhere" for span in lost]
    for call in filter(_is_generate, spans):
        below = [call, *_below(call, spans)]
        problems += _root_faults(call, below)
        if not incomplete:
            problems += _answer_faults(call, below)
    return problems


def lost_processes(spans: Iterable[TraceSpan]) -> set[str]:
    """Return the kinds of processes that a trace says were lost: "worker", "batcher", or both."""
    lost = (span.attributes.get(names.RECOVERED_FROM) for span in spans)
    return {str(kind) for kind in lost if kind}


def is_root(span: TraceSpan) -> bool:
    """Return whether a span may have no parent in its trace: it is of a call or a job."""
    return span.name in ROOTS or names.HTTP_ROUTE in span.attributes


def is_model(span: TraceSpan) -> bool:
    """Return whether the span covers a model's work."""
    return span.attributes.get(names.MESSAGING_OPERATION) == names.SEND


def _is_generate(span: TraceSpan) -> bool:
    operation = span.attributes.get(names.GEN_AI_OPERATION)
    by_http = names.HTTP_ROUTE in span.attributes and operation in ("chat", "text_completion")
    return by_http or span.name == names.SPAN_GENERATE


def _is_triton(span: TraceSpan) -> bool:
    return span.service == names.SERVICE_TRITON


def _clock_faults(spans: Sequence[TraceSpan]) -> Iterator[str]:
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parent is None or _is_cancelled(span) or _is_cancelled(parent):
            continue
        longer = span.end_ns - span.start_ns >= parent.end_ns - parent.start_ns
        may_go_on = span.name == names.SPAN_SHADOW or _is_triton(span)
        if span.start_ns < parent.start_ns - SLACK_NS:
            early_ms = (parent.start_ns - span.start_ns) / 1e6
            yield f"{span.label} begins {early_ms:.1f} ms before {parent.label}"
        elif span.end_ns > parent.end_ns + SLACK_NS and not (longer or may_go_on):
            late_ms = (span.end_ns - parent.end_ns) / 1e6
            yield f"{span.label} ends {late_ms:.1f} ms after {parent.label}"


def _is_cancelled(span: TraceSpan) -> bool:
    reasons = {str(span.attributes.get(names.END, "")), *_reasons(span)}
    return bool(reasons & _CANCELLED)


def _reasons(span: TraceSpan) -> list[str]:
    reasons = span.attributes.get(names.GEN_AI_FINISH_REASONS, ())
    return [reasons] if isinstance(reasons, str) else [str(one) for one in reasons]


def _root_faults(root: TraceSpan, spans: Sequence[TraceSpan]) -> Iterator[str]:
    for name in _SEARCHED:
        if not root.attributes.get(name):
            yield f"the root has no {name}"
    if not _reasons(root) and names.ERROR_REASON not in root.attributes:
        yield "the root says neither how the answer ended nor why it failed"
    again = any(
        span.attributes.get(names.ATTEMPT)
        for span in spans
        if span.name == names.SPAN_DECODE or is_model(span)
    )
    resumed = any(
        span.attributes.get(names.END) == "lost" and span.attributes.get(names.OUTPUT_TOKENS)
        for span in spans
    )
    if again and resumed and _reasons(root) and not root.attributes.get(names.RECOVERED):
        yield f"the answer was recovered, and the root has no {names.RECOVERED}"


def _answer_faults(root: TraceSpan, spans: Sequence[TraceSpan]) -> Iterator[str]:
    answered = [
        span for span in spans if is_model(span) and span.attributes.get(names.END) == "answered"
    ]
    if not _reasons(root) or not answered or not root.attributes.get(names.GEN_AI_OUTPUT_TOKENS):
        return
    model = root.attributes.get(names.GEN_AI_RESPONSE_MODEL)
    if answered[-1].attributes.get(names.GEN_AI_REQUEST_MODEL) != model:
        yield f"the root names {model}, which has no span that answered"
    below = list(_below(answered[-1], spans))
    for name in _OF_ANSWERS:
        if all(span.name != name for span in below):
            yield f"the answer has no {name}"


def _below(span: TraceSpan, spans: Sequence[TraceSpan]) -> Iterator[TraceSpan]:
    for child in spans:
        if child.parent_id == span.span_id:
            yield child
            yield from _below(child, spans)
