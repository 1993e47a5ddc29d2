"""`sluice traces`: whether the traces that a Jaeger has of the mesh are whole."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from typer import Argument, BadParameter, Option

from cli import output
from cli.commands import Commands
from cli.jaeger import Jaeger, JaegerTrace, full_id
from cli.trace_rules import TraceSpan, faults, is_model, is_root, lost_processes
from sluice.telemetry import names

LIMIT_MAX: Final = 1500
LINKED_MAX: Final = 200
"""Traces that are read because a span of a checked one links to them."""
SHOWN: Final = 8
"""Faults of a trace that are shown."""
HOPS: Final = (names.SERVICE_GATEWAY, names.SERVICE_BATCHER, names.SERVICE_WORKER)

traces = Commands("Check the traces of the mesh.")


@traces.callback()
def _group() -> None:
    """Keep `check` a command of its own: Typer makes the only command of a group the group itself."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a trace.

    Attributes:
        lost_with: kinds of processes that were lost, with spans of the trace; empty if none are missing.
    """

    trace_id: str
    spans: int
    faults: Sequence[str]
    lost_with: Sequence[str]

    @property
    def word(self) -> str:
        """The verdict in a word."""
        if self.faults:
            return "faulty"
        return "incomplete" if self.lost_with else "whole"


@traces.command()
def check(
    *,
    trace_ids: list[str] | None = Argument(
        None,
        help="Trace ids, 32 hex digits.  [default: the latest traces]",
        metavar="[TRACE_ID]...",
    ),
    jaeger: str = Option("http://127.0.0.1:16686", help="Jaeger's query API.", metavar="URL"),
    limit: int = Option(20, help="Number of latest traces to check.", min=1, max=LIMIT_MAX),
    lookback: float = Option(3600.0, help="Maximum age of the latest traces, in seconds.", min=1.0),
    settle: float = Option(
        5.0, help="Skip traces that began less than this many seconds ago.", min=0.0
    ),
    triton: bool = Option(
        False, "--triton", help="Require spans of Triton itself in traces of answers, too."
    ),
) -> None:
    """Check whether traces are whole: root, parents, a span of each hop, and links.

    Exit code 0 only if all are whole. A trace is incomplete if spans are missing and its answer was recovered from a
    process that was killed; it is faulty if anything else is wrong.
    """
    source = Jaeger(jaeger)
    if trace_ids:
        checked, verdicts = _named(source, [_id_of(one) for one in trace_ids])
    else:
        checked, verdicts = source.find(names.SERVICE_GATEWAY, limit, lookback, settle), []
    known = _known(source, checked)
    verdicts += [_verdict(trace, known, triton=triton) for trace in checked]
    _show(verdicts)


def _id_of(text: str) -> str:
    try:
        return full_id(text)
    except ValueError:
        raise BadParameter(
            f"{text!r} is no trace id; it has 32 hex digits", param_hint="TRACE_ID"
        ) from None


def _named(source: Jaeger, ids: Sequence[str]) -> tuple[list[JaegerTrace], list[Verdict]]:
    """Return the traces with these ids, and verdicts on those that Jaeger does not have."""
    traces_read, missing = list[JaegerTrace](), list[Verdict]()
    for trace_id in dict.fromkeys(ids):
        trace = source.get(trace_id)
        if trace is None:
            missing.append(Verdict(trace_id, 0, ["Jaeger has no trace of this id"], ()))
        else:
            traces_read.append(trace)
    return traces_read, missing


def _known(source: Jaeger, found: Sequence[JaegerTrace]) -> set[tuple[str, str]]:
    """Return all spans of `found`, and those of the traces that they link to, as far as these are read."""
    have = {trace.trace_id for trace in found}
    linked = dict.fromkeys(
        link[0] for trace in found for span in trace.spans for link in span.links
    )
    others = [trace_id for trace_id in linked if trace_id not in have]
    read = [source.get(trace_id) for trace_id in others[:LINKED_MAX]]
    known = {
        (trace.trace_id, span.span_id)
        for trace in (*found, *read)
        if trace is not None
        for span in trace.spans
    }
    unread = set(others[LINKED_MAX:])
    # A link to a trace that was not read counts as resolved.
    known |= {
        link for trace in found for span in trace.spans for link in span.links if link[0] in unread
    }
    return known


def _verdict(trace: JaegerTrace, known: Collection[tuple[str, str]], *, triton: bool) -> Verdict:
    wrong = faults(trace.spans, known)
    if not any(map(is_root, trace.spans)):
        wrong.append("it has no root: no span of a call or a job")
    wrong += _missing_hops(trace.spans, HOPS + (names.SERVICE_TRITON,) * triton)
    lost_with = sorted(lost_processes(trace.spans)) if wrong else []
    if lost_with:
        wrong = faults(trace.spans, known, incomplete=True)
    return Verdict(trace.trace_id, len(trace.spans), wrong, lost_with)


def _missing_hops(spans: Iterable[TraceSpan], hops: Iterable[str]) -> list[str]:
    """Return what is missing of a trace in which a row was answered."""
    spans = list(spans)
    answered = any(
        is_model(span) and span.attributes.get(names.END) == "answered" for span in spans
    )
    services = {span.service for span in spans}
    return [f"no span of {hop}" for hop in hops if answered and hop not in services]


def _show(verdicts: Sequence[Verdict]) -> None:
    counts = Counter(verdict.word for verdict in verdicts)
    whole = counts["whole"]
    described: dict[str, Any] = {
        "traces": [
            {
                "trace_id": verdict.trace_id,
                "verdict": verdict.word,
                "spans": verdict.spans,
                "faults": list(verdict.faults),
                "incomplete_from": list(verdict.lost_with),
            }
            for verdict in verdicts
        ],
        "whole": whole,
        "incomplete": counts["incomplete"],
        "faulty": counts["faulty"],
    }
    failed = None
    if not verdicts:
        failed = (
            "NO_TRACES",
            "Jaeger has no traces of sluice-gateway; raise --lookback, or set "
            "OTEL_EXPORTER_OTLP_ENDPOINT where the mesh starts",
        )
    elif whole < len(verdicts):
        failed = ("NOT_WHOLE", f"{len(verdicts) - whole} of {len(verdicts)} not whole")
    output.show(described, lambda: _print(verdicts, counts), failed)


def _print(verdicts: Sequence[Verdict], counts: Counter[str]) -> None:
    for verdict in verdicts:
        if verdict.word == "whole":
            continue
        output.write_line(f"{verdict.trace_id}  {verdict.word}")
        if verdict.lost_with:
            lost_with = ", ".join(verdict.lost_with)
            output.write_line(f"  spans may be missing: lost with a {lost_with}")
        for fault in verdict.faults[:SHOWN]:
            output.write_line(f"  {fault}")
        if len(verdict.faults) > SHOWN:
            output.write_line(f"  and {len(verdict.faults) - SHOWN} more; --json has all")
    words = ("whole", "incomplete", "faulty")
    noun = "trace" if len(verdicts) == 1 else "traces"
    output.write_line(
        f"{len(verdicts)} {noun}: " + ", ".join(f"{counts[word]} {word}" for word in words)
    )
