"""`sluice explain`, `trace` and `feedback`: the decisions about a request, where its time went, and its grade."""

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC
from typing import Annotated, Final

from typer import Argument, Option

from cli import options, output
from sluice.client import Client
from sluice.errors import RecordUnknown
from sluice.v1 import admin_pb2 as pb
from sluice.v1.admin_pb2 import RequestRecord
from sluice.v1.inference_pb2 import FinishReason, Priority, RouteStrategy, Timings
from sluice.v1.safety_pb2 import SafetyAction
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

RequestId = Annotated[
    str,
    Argument(help="Id of a request, or of its trace, as the answer shows it.", metavar="ID"),
]
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}", re.IGNORECASE)

_INDENT: Final = 10
"""Width of the words in front of the lines of `sluice explain`."""
_RECORD_WAITS_S: Final = (0.1, 0.2)
"""Records are written within 0.1 s after the end of a request."""
_GUARD = "guard."
_HOPS: Final = (
    *("admission", "safety", "route", "tokenize", "publish"),
    *("queue", "batch", "prefill", "decode", "delivery"),
)
"""In the order in which they follow each other."""


def explain(
    *,
    request_id: RequestId,
    audit: bool = Option(
        False, "--audit", help="Show the audit entry instead, which is kept longer."
    ),
    client: options.OperatorClient,
) -> None:
    """Show the decisions about a request: route, batch, cost.

    Records hold no text of prompts and answers.
    """
    if audit:
        entry = client.audit(_request_id(client, request_id))
        output.show(_object(entry), _text(_audit(entry)))
        return
    response = look_up(client, request_id)
    output.show(_object(response), _text(_lines(response)))


def _text(lines: Iterable[str]) -> str:
    return "\n".join(output.folded(line, _INDENT) for line in lines)


def look_up(client: Client, name: str) -> pb.GetRequestRecordResponse:
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


def _object(explained: pb.GetRequestRecordResponse | pb.GetAuditEntryResponse) -> dict[str, object]:
    from google.protobuf.json_format import MessageToDict

    described: dict[str, object] = MessageToDict(explained, preserving_proto_field_name=True)
    return described


def _lines(explained: pb.GetRequestRecordResponse) -> Iterator[str]:
    record = explained.record
    arrived = record.arrival_time.ToDatetime(UTC)
    yield f"request   {record.request_id}, trace {record.trace_id}, gateway {record.gateway}"
    if explained.other_request_ids:
        yield f"          its trace also has {', '.join(explained.other_request_ids)}"
    work = f", task {record.workload}" if record.workload else ""
    work += f", {record.operation}" if record.operation else ""
    yield f"asked     {arrived:%Y-%m-%d %H:%M:%S} UTC by {record.tenant}, {word_of(Priority, record.priority)}{work}"
    yield f"safety    {_safety(record)}"
    for guard in record.guards:
        yield f"guard     {_guard(guard, record.currency)}"
    if record.HasField("route"):
        yield from _route(record.requested_model, record.route)
    for attempt in record.attempts:
        yield from _attempt(attempt, record.currency)
    for run in record.shadows:
        yield f"shadow    {_shadow(run, record.currency)}"
    if record.HasField("timings"):
        yield f"time      {_times(record.timings)}"
    yield f"end       {_end(record)}"
    if explained.HasField("grade"):
        yield f"grade     {explained.grade.grade:g}"


def _safety(record: pb.RequestRecord) -> str:
    if not record.policy:
        return "not reached"
    # What guards said has lines of its own.
    actions = _decisions(
        decision for decision in record.decisions if not decision.rule.startswith(_GUARD)
    )
    return f"{actions or 'nothing actions'}, policy {record.policy}"


def _decisions(decisions: Iterable[pb.SafetyDecision]) -> str:
    return ", ".join(
        f"{decision.rule} x{decision.count} {_action(decision.action)}"
        + (" (answer)" if decision.in_answer else "")
        for decision in decisions
    )


def _action(action: "SafetyAction.ValueType") -> str:
    return word_of(SafetyAction, action)


def _guard(guard: pb.GuardCheck, currency: str) -> str:
    about = f"answer, {guard.answer_tokens} tokens" if guard.in_answer else "prompt"
    score = f", score {guard.score:.2f}" if guard.HasField("score") else ""
    return (
        f"{guard.guard} ({guard.model}) on the {about}: {_outcome(guard)},"
        f" {_action(guard.action)}{score}; {ms_of(guard.duration):.1f} ms, cost {guard.cost:.3g} {currency}"
    )


def _outcome(guard: pb.GuardCheck) -> str:
    return guard.failure or ", ".join(guard.categories) or word_of(pb.GuardOutcome, guard.outcome)


def _audit(entry: pb.GetAuditEntryResponse) -> Iterator[str]:
    decided = entry.decision_time.ToDatetime(UTC)
    yield f"request   {entry.request_id} of {entry.tenant}"
    yield f"decided   {decided:%Y-%m-%d %H:%M:%S} UTC, policy {entry.policy}"
    yield f"safety    {_decisions(entry.decisions)}"
    if entry.blocked:
        yield "          the prompt was refused"
    if entry.governed_model:
        yield f"          answered by the governed model {entry.governed_model}"
    if entry.prompt_hmac:
        yield f"prompt    HMAC {entry.prompt_hmac.hex()}"
    if entry.with_text:
        yield "          its text is in the entry"


def _route(asked: str, route: pb.RouteRecord) -> Iterator[str]:
    degraded = ", degraded" if route.degraded else ""
    yield f"route     asked for {asked}: {word_of(RouteStrategy, route.strategy)}, {route.reason}{degraded}"
    for name, version in sorted(route.versions.items()):
        yield f"          {name} {version}"
    for score in route.scores:
        chances = ", ".join(
            f"{model} {score.chances[model]:.2f}" for model in sorted(score.chances)
        )
        yield (
            f"          {score.policy}, {word_of(pb.RouterHead, score.head)} head of {score.version}:"
            f" gain {score.gain:.2f} ({chances})"
        )
    for number, one in enumerate(route.candidates, 1):
        quality = f", quality {one.quality:.2f}" if one.HasField("quality") else ""
        yield (
            f"  {number}.      {one.model} ({one.tier}){quality}, cost {one.cost:.3g},"
            f" wait {ms_of(one.expected_wait):.0f} ms: {one.reason}"
        )


def _attempt(attempt: pb.ModelAttempt, currency: str) -> Iterator[str]:
    tokens = f"{attempt.prompt_tokens} + {attempt.completion_tokens} tokens"
    if attempt.rows:
        tokens = f"{attempt.rows} rows, {attempt.prompt_tokens} tokens"
    if attempt.HasField("server_prompt_tokens"):
        theirs = f"{attempt.server_prompt_tokens} + {attempt.server_completion_tokens}"
        tokens += f" by our count, {theirs} by the server's"
    again = f", sent again {_times_of(attempt.attempt)}" if attempt.attempt else ""
    yield f"model     {attempt.model}: {tokens}, cost {attempt.cost:.3g} {currency}{again}"
    if attempt.HasField("expected_time"):
        yield f"          expected to take {ms_of(attempt.expected_time):.0f} ms when it was sent"
    if attempt.batch_id:
        yield f"batch     {attempt.batch_id}: {_members(attempt.batch_rows)} on {attempt.worker}"
        yield (
            f"          sent because of {attempt.batch_cause}, {attempt.padding_share:.0%} padding;"
            f" waited {ms_of(attempt.queue_wait):.1f} ms (longest in the batch"
            f" {ms_of(attempt.queue_wait_max):.1f} ms)"
        )
    if attempt.hint_tokens:
        yield f"          saw the draft of the first model: {attempt.hint_tokens} tokens of the prompt"
    if attempt.hint_dropped:
        yield f"          did not see the draft: {attempt.hint_dropped}"
    if attempt.escalation_reason:
        yield f"          escalated: {attempt.escalation_reason}"
    if attempt.kept_reason:
        yield f"          kept although {attempt.kept_reason}"


def _times_of(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _members(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _shadow(run: pb.ShadowRun, currency: str) -> str:
    if run.dropped:
        return f"{run.model}: {run.dropped}; cost {run.cost:.3g} {currency}"
    tokens = f"{run.prompt_tokens} + {run.completion_tokens} tokens"
    return (
        f"{run.model} agrees to {run.agreement:.0%}: {tokens}, cost {run.cost:.3g} {currency},"
        f" {ms_of(run.duration):.1f} ms"
    )


def _times(timings: Timings) -> str:
    took = {hop: f"{ms_of(getattr(timings, hop)):.1f}" for hop in _HOPS}
    hops = ", ".join(f"{hop} {ms}" for hop, ms in took.items() if ms != "0.0")
    first, total = ms_of(timings.time_to_first_token), ms_of(timings.total)
    return f"first token {first:.1f} ms, total {total:.1f} ms: {hops}"


def _end(record: pb.RequestRecord) -> str:
    if record.error_reason:
        return f"error {record.error_reason}"
    kept = f", {'found' if record.cached else 'kept'} as {record.answer_key}"
    return word_of(FinishReason, record.finish_reason) + (kept if record.answer_key else "")


_ROUNDED_MS: Final = 0.01
"""What the steps may lack of the total."""
_BAR: Final = 48
"""Width of the longest bar: a line has 80 columns."""


@dataclass(frozen=True)
class Hop:
    """A part of the request's time, milliseconds from its arrival on."""

    name: str
    start_ms: float
    ms: float


def trace(request_id: RequestId, client: options.OperatorClient) -> None:
    """Show where the time of a request went.

    A bar for each step, its batch, and what it waited for.
    """
    record = look_up(client, request_id).record
    output.show(
        trace_object(record), "\n".join(output.folded(line, 2) for line in trace_lines(record))
    )


def trace_object(record: RequestRecord) -> dict[str, object]:
    """Describe where the time of a request went, for `--json`."""
    return {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "total_ms": ms_of(record.timings.total),
        "hops": [vars(hop) for hop in waterfall(record)],
    }


def waterfall(record: RequestRecord) -> list[Hop]:
    """Return the steps of a request in order; empty without timings."""
    if not record.HasField("timings"):
        return []
    hops, at_ms = list[Hop](), 0.0
    for name in _HOPS:
        ms = ms_of(getattr(record.timings, name))
        hops.append(Hop(name, at_ms, ms))
        at_ms += ms
    rest_ms = ms_of(record.timings.total) - at_ms
    return [*hops, Hop("other", at_ms, rest_ms)] if rest_ms > _ROUNDED_MS else hops


def trace_lines(record: RequestRecord) -> Iterator[str]:
    """Draw where the time of a request went, in lines of at most 80 columns."""
    hops = waterfall(record)
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
            others = f"with {attempt.batch_rows - 1} more" if attempt.batch_rows > 1 else "alone"
            yield (
                f"  {others} in {attempt.batch_id} ({attempt.batch_cause});"
                f" waited {ms_of(attempt.queue_wait):.1f} ms"
            )
        if attempt.escalation_reason:
            yield f"  then another model: {attempt.escalation_reason}"
