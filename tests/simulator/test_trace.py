"""Traces: what a line may say, and how a wrong one is told."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.trace import Arrival, SimulationError, format_line, parse_trace
from sluice.wire.subjects import CLASSES

GOOD = '{"at_s": 1, "prompt_tokens": 3, "answer_tokens": 2}'

seconds = st.floats(0, 1e6, allow_nan=False)
arrivals = st.builds(
    Arrival,
    at_s=seconds,
    prompt_tokens=st.integers(1, 10_000),
    answer_tokens=st.integers(1, 50),
    max_tokens=st.integers(50, 5000),
    priority_class=st.sampled_from(CLASSES),
    tenant=st.text(min_size=1, max_size=9),
    workload=st.text(max_size=9),
    timeout_s=st.none() | seconds,
    model=st.text(max_size=9),
    ttft_s=st.none() | seconds,
    latency_s=st.none() | seconds,
)


@given(st.lists(arrivals, min_size=1, max_size=5))
def test_what_is_written_is_read_in_order_of_time(written: list[Arrival]) -> None:
    lines = "\n\n".join(format_line(arrival) for arrival in written)
    assert parse_trace(lines.splitlines()) == sorted(written, key=lambda a: a.at_s)


def test_what_is_not_said_has_a_default() -> None:
    (arrival,) = parse_trace([GOOD])
    assert arrival == Arrival(at_s=1.0, prompt_tokens=3, answer_tokens=2, max_tokens=2)
    assert json.loads(format_line(arrival))["class"] == "standard"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"prompt_tokens": 3, "answer_tokens": 2}', "at_s is missing"),
        ('{"at_s": 1, "answer_tokens": 2}', "prompt_tokens is missing"),
        ('{"at_s": -1, "prompt_tokens": 3, "answer_tokens": 2}', "at_s: -1"),
        ('{"at_s": NaN, "prompt_tokens": 3, "answer_tokens": 2}', "at_s: nan"),
        ('{"at_s": true, "prompt_tokens": 3, "answer_tokens": 2}', "at_s: True"),
        ('{"at_s": 1, "prompt_tokens": 0, "answer_tokens": 2}', "prompt_tokens: 0"),
        ('{"at_s": 1, "prompt_tokens": 3.5, "answer_tokens": 2}', "prompt_tokens: 3.5"),
        (GOOD[:-1] + ', "max_tokens": 1}', "max_tokens: 1 is less than answer_tokens"),
        (
            GOOD[:-1] + ', "class": "urgent"}',
            "class: 'urgent': String should match pattern '^(interactive|",
        ),
        (GOOD[:-1] + ', "tenant": 7}', "tenant: 7: Input should be a valid string"),
        (GOOD[:-1] + ', "prompt": "hello"}', "prompt: 'hello': Unexpected keyword argument"),
    ],
)
def test_a_wrong_line_is_told_by_its_number(line: str, said: str) -> None:
    with pytest.raises(SimulationError) as raised:
        parse_trace([GOOD, "", line])
    assert str(raised.value).startswith("line 3: ")
    assert said in str(raised.value)


def test_a_trace_without_arrivals_is_none() -> None:
    with pytest.raises(SimulationError, match="no arrivals"):
        parse_trace(["", "  "])
