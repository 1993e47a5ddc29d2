"""Which traces are whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cli.trace_rules import TraceSpan, faults, lost_processes
from sluice.telemetry import names

MS = 1_000_000
SEARCHED = {
    names.REQUEST_ID: "req-1",
    names.TENANT: "acme",
    names.PRIORITY_CLASS: "interactive",
    names.GEN_AI_REQUEST_MODEL: "auto",
}
ENDED = {
    names.GEN_AI_FINISH_REASONS: ("stop",),
    names.GEN_AI_OUTPUT_TOKENS: 3,
    names.GEN_AI_RESPONSE_MODEL: "small",
}
CHAT = "chat small"
LOST = {names.END: "lost", names.OUTPUT_TOKENS: 2}
ANSWERED = {
    names.END: "answered",
    names.GEN_AI_REQUEST_MODEL: "small",
    names.MESSAGING_OPERATION: names.SEND,
}


def span(name: str, parent: str, start: float, end: float, **attributes: Any) -> TraceSpan:
    return TraceSpan("s", name, name, parent, int(start * MS), int(end * MS), attributes)


TRACE = {
    one.name: one
    for one in (
        span(names.SPAN_GENERATE, "caller", 0, 100, **SEARCHED, **ENDED),
        span(names.SPAN_SAFETY, names.SPAN_GENERATE, 1, 4),
        span(CHAT, names.SPAN_GENERATE, 5, 98, **ANSWERED),
        span(names.SPAN_TASK, CHAT, 6, 97),
        span(names.SPAN_QUEUE, names.SPAN_TASK, 7, 8),
        span(names.SPAN_BATCH, names.SPAN_TASK, 8, 96),
        span(names.SPAN_PREFILL, names.SPAN_BATCH, 9, 20),
        span(names.SPAN_DECODE, names.SPAN_BATCH, 20, 95),
    )
}


def changed(name: str, **changes: Any) -> list[TraceSpan]:
    return [replace(one, **changes) if one.name == name else one for one in TRACE.values()]


def without(*gone: str) -> list[TraceSpan]:
    return [one for name, one in TRACE.items() if name not in gone]


def test_a_whole_trace_has_no_fault() -> None:
    assert faults(list(TRACE.values())) == []


def test_root_over_http_is_known_by_its_route() -> None:
    over_http = {names.HTTP_ROUTE: "/v1/chat/completions", names.GEN_AI_OPERATION: "chat"}
    root = {**SEARCHED, **ENDED, **over_http}
    call = [
        replace(one, name="POST /v1/chat/completions") if one.name == names.SPAN_GENERATE else one
        for one in changed(names.SPAN_GENERATE, attributes=root)
    ]
    assert faults(call) == []
    cut = [one for one in call if one.name not in (names.SPAN_PREFILL, names.SPAN_DECODE)]
    assert any("the answer has no prefill" in fault for fault in faults(cut))


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (lambda: without(names.SPAN_TASK), "without a parent: s batch, s queue"),
        (lambda: without(names.SPAN_PREFILL, names.SPAN_DECODE), "the answer has no prefill"),
        (lambda: changed(names.SPAN_DECODE, end_ns=99 * MS), "decode ends 3.0 ms after s batch"),
        (lambda: changed(names.SPAN_QUEUE, start_ns=2 * MS), "queue begins 4.0 ms before s task"),
        (lambda: changed(names.SPAN_GENERATE, attributes=ENDED), "the root has no sluice.tenant"),
        (lambda: changed(names.SPAN_GENERATE, attributes=SEARCHED), "neither how the answer ended"),
        (
            lambda: changed(
                names.SPAN_GENERATE,
                attributes={**SEARCHED, **ENDED, names.GEN_AI_RESPONSE_MODEL: "large"},
            ),
            "the root names large",
        ),
        (
            lambda: [
                *changed(names.SPAN_DECODE, attributes={names.ATTEMPT: 1}),
                span("lost", names.SPAN_TASK, 8, 9, **LOST),
            ],
            "the root has no sluice.recovered",
        ),
    ],
)
def test_each_fault_is_named(spans: Callable[[], list[TraceSpan]], words: str) -> None:
    assert any(words in fault for fault in faults(spans())), faults(spans())


def test_an_answer_that_had_no_token_yet_was_not_recovered() -> None:
    lost = span("lost", names.SPAN_TASK, 8, 9, **{**LOST, names.OUTPUT_TOKENS: 0})
    again = changed(names.SPAN_DECODE, attributes={names.ATTEMPT: 1})
    assert faults([*again, lost]) == []


def test_a_decode_of_one_token_takes_no_time() -> None:
    assert faults(changed(names.SPAN_DECODE, start_ns=20 * MS, end_ns=20 * MS)) == []


def test_nobody_waits_for_the_end_of_a_request_to_triton() -> None:
    late = span("InferRequest", CHAT, 8, 99.5)
    assert faults([*TRACE.values(), late])
    assert faults([*TRACE.values(), replace(late, service=names.SERVICE_TRITON)]) == []


NOT_SEARCHED = (names.REQUEST_ID, names.TENANT, names.PRIORITY_CLASS, names.GEN_AI_REQUEST_MODEL)


def test_an_incomplete_trace_may_lack_spans() -> None:
    lacking = without(names.SPAN_PREFILL, names.SPAN_DECODE)
    assert faults(lacking)
    assert faults(lacking, incomplete=True) == []
    root = next(one for one in lacking if one.name == names.SPAN_GENERATE)
    unsearchable = [replace(one, attributes=ENDED) if one is root else one for one in lacking]
    missing = [f"the root has no {name}" for name in NOT_SEARCHED]
    assert faults(unsearchable, incomplete=True) == missing


def test_a_recovered_answer_names_what_was_lost() -> None:
    assert lost_processes(TRACE.values()) == set()
    recovered = changed(names.SPAN_GENERATE, attributes={names.RECOVERED_FROM: "worker"})
    assert lost_processes(recovered) == {"worker"}


def test_a_link_that_leads_nowhere_is_a_fault() -> None:
    spans = changed(names.SPAN_BATCH, links=(("t", "gone"),))
    assert faults(spans, known_spans={("t", "other")}) == ["s batch: a link leads nowhere"]
    assert faults(spans, known_spans={("t", "gone")}) == []
