"""`sluice traces`: whether the traces that a Jaeger has of the mesh are whole."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from typer import Argument, BadParameter, Option

from cli import output
from cli.commands import Commands
from cli.jaeger import Jaeger, JaegerTrace, full_id
from cli.trace_rules import faults, is_model, is_root, lost_processes
from sluice.telemetry import names

LIMIT_MAX: Final = 1500
LINKED_MAX: Final = 200
"""Traces that are read because a span of a checked one links to them."""
HOPS: Final = (names.SERVICE_GATEWAY, names.SERVICE_BATCHER, names.SERVICE_WORKER)

traces = Commands("Check the traces of the mesh.")


@traces.command()
def check(
    *,
    trace_ids: list[str] | None = Argument(
        None, help="32 hex digits.  [default: the latest]", metavar="[TRACE_ID]..."
    ),
    jaeger: str = Option("http://127.0.0.1:16686", help="Jaeger's query API.", metavar="URL"),
    limit: int = Option(20, help="Number of latest traces to check.", min=1, max=LIMIT_MAX),
    lookback: float = Option(3600.0, help="Maximum age of the latest traces, in seconds.", min=1.0),
    settle: float = Option(5.0, help="Skip traces that began less than this ago, s.", min=0.0),
    triton: bool = Option(False, "--triton", help="Require spans of Triton, too."),
) -> None:
    """Check whether traces are whole: root, parents, a span of each hop, and links.

    Exit code 0 only if all are whole. A trace is incomplete if spans are missing and its answer was recovered from a
    process that was killed; it is faulty if anything else is wrong.
    """
    source, missing = Jaeger(jaeger), list[str]()
    if trace_ids:
        named = {one: source.get(one) for one in dict.fromkeys(map(_id_of, trace_ids))}
        checked = [trace for trace in named.values() if trace is not None]
        missing = [trace_id for trace_id, trace in named.items() if trace is None]
    else:
        checked = source.find(names.SERVICE_GATEWAY, limit, lookback, settle)
    known_spans, hops = _known_spans(source, checked), HOPS + (names.SERVICE_TRITON,) * triton
    verdicts = [_verdict(one, 0, ["Jaeger has no trace of this id"], []) for one in missing]
    _show([*verdicts, *(_judge(trace, known_spans, hops) for trace in checked)])


def _id_of(text: str) -> str:
    try:
        return full_id(text)
    except ValueError:
        raise BadParameter(
            f"{text!r} is no trace id; it has 32 hex digits", param_hint="TRACE_ID"
        ) from None


def _known_spans(source: Jaeger, trace_list: Sequence[JaegerTrace]) -> set[tuple[str, str]]:
    """Return all spans of `trace_list` and all links of them that resolve.

    These lead to a span of `trace_list` or of one of `LINKED_MAX` more traces, or to traces that are not read.
    """
    links = {link for trace in trace_list for span in trace.spans for link in span.links}
    others = sorted({trace_id for trace_id, _ in links} - {trace.trace_id for trace in trace_list})
    read = [*trace_list, *filter(None, map(source.get, others[:LINKED_MAX]))]
    spans = {(trace.trace_id, span.span_id) for trace in read for span in trace.spans}
    return spans | {link for link in links if link[0] in others[LINKED_MAX:]}


def _judge(
    trace: JaegerTrace, known_spans: Collection[tuple[str, str]], hops: Sequence[str]
) -> dict[str, Any]:
    """Return the verdict on a trace; one in which a row was answered has spans of all `hops`."""
    wrong = faults(trace.spans, known_spans)
    if not any(map(is_root, trace.spans)):
        wrong.append("it has no root: no span of a call or a job")
    services = {span.service for span in trace.spans}
    ends = [span.attributes.get(names.END) for span in trace.spans if is_model(span)]
    if "answered" in ends:
        wrong += [f"no span of {hop}" for hop in hops if hop not in services]
    lost_with = sorted(lost_processes(trace.spans)) if wrong else []
    if lost_with:
        wrong = faults(trace.spans, known_spans, incomplete=True)
    return _verdict(trace.trace_id, len(trace.spans), wrong, lost_with)


def _verdict(
    trace_id: str, spans: int, wrong: Sequence[str], lost_with: Sequence[str]
) -> dict[str, Any]:
    """Return what is wrong with a trace; `lost_with`: the processes that were lost with spans of it."""
    word = "incomplete" if lost_with else "whole"
    return {
        "trace_id": trace_id,
        "verdict": "faulty" if wrong else word,
        "spans": spans,
        "faults": wrong,
        "incomplete_from": lost_with,
    }


def _lines(verdict: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong; nothing of a whole trace."""
    if verdict["verdict"] != "whole":
        yield f"{verdict['trace_id']}  {verdict['verdict']}"
    if verdict["incomplete_from"]:
        yield f"  spans may be missing: lost with a {', '.join(verdict['incomplete_from'])}"
    yield from (f"  {fault}" for fault in verdict["faults"])


def _show(verdicts: Sequence[Mapping[str, Any]]) -> None:
    counts = Counter(verdict["verdict"] for verdict in verdicts)
    sums = {word: counts[word] for word in ("whole", "incomplete", "faulty")}
    failed = None
    if not verdicts:
        failed = (
            "NO_TRACES",
            "Jaeger has no traces of sluice-gateway; raise --lookback, or set "
            "OTEL_EXPORTER_OTLP_ENDPOINT where the mesh starts",
        )
    elif sums["whole"] < len(verdicts):
        failed = ("NOT_WHOLE", f"{len(verdicts) - sums['whole']} of {len(verdicts)} not whole")
    lines = [line for verdict in verdicts for line in _lines(verdict)]
    lines.append(", ".join(f"{count} {word}" for word, count in sums.items()))
    output.show({"traces": verdicts, **sums}, "\n".join(lines), failed)
