"""Numbers out of a run, checked on one that is counted by hand."""

import pytest

from simulator.results import (
    DEFAULT_SLOS,
    Ending,
    History,
    RequestOutcome,
    Slo,
    parse_slos,
    percentiles,
    summarize,
)
from simulator.trace import SimulationError
from tests.simulator.kit import arrival


def finished(at_s: float, ttft_s: float, latency_s: float, wait_s: float = 0.0) -> RequestOutcome:
    request = arrival(at_s, answer=10, priority_class="interactive")
    return RequestOutcome(request, Ending.FINISHED, wait_s, at_s + ttft_s, at_s + latency_s)


def history() -> History:
    outcomes = [finished(n, 0.1 * n, 1.0 + n, wait_s=0.05 * n) for n in range(1, 11)]
    bulk = arrival(0.0, priority_class="bulk")
    outcomes += [
        RequestOutcome(bulk, Ending.OPEN, 20.0),
        RequestOutcome(bulk, Ending.EXPIRED, 1.0),
        RequestOutcome(bulk, Ending.REFUSED),
    ]
    return History(
        outcomes,
        workers=2,
        slots=4,
        seconds=20.0,
        busy_s=30.0,
        slot_s=80.0,
        batches=5,
        requests_sent=10,
        cells=200,
        filled=150,
    )


def test_a_run_in_numbers() -> None:
    summary = summarize(history(), {**DEFAULT_SLOS, "interactive": Slo(ttft_s=0.45)}, 36.0)
    interactive, bulk = summary.classes
    assert (interactive.arrived, interactive.finished) == (10, 10)
    assert interactive.ttft_s.p50 == pytest.approx(0.5)
    assert interactive.latency_s.p99 == pytest.approx(11.0)
    assert interactive.within_slo == pytest.approx(0.4)
    assert interactive.goodput_per_s == pytest.approx(4 / 20)
    assert interactive.longest_wait_s == pytest.approx(0.5)
    assert (bulk.open, bulk.expired, bulk.refused, bulk.finished) == (1, 1, 1, 0)
    assert bulk.longest_wait_s == 20.0
    assert bulk.ttft_s.p50 is None
    assert summary.within_slo == pytest.approx(4 / 13)
    assert summary.tokens_per_s == pytest.approx(100 / 20)
    assert summary.padding_share == pytest.approx(0.25)
    assert summary.rows_per_batch == 2.0
    assert summary.utilization == pytest.approx(0.75)
    assert summary.occupancy == pytest.approx(0.5)
    assert summary.cost == pytest.approx(36.0 * 40 / 3600)
    assert summary.cost_per_million_tokens == pytest.approx(0.4 / 100 * 1e6)


def test_an_objective_covers_first_token_and_end() -> None:
    outcome = finished(0.0, 0.2, 2.0)
    assert Slo().met(outcome)
    assert Slo(0.2, 2.0).met(outcome)
    assert not Slo(ttft_s=0.1).met(outcome)
    assert not Slo(latency_s=1.9).met(outcome)
    assert not Slo().met(RequestOutcome(arrival(0.0), Ending.EXPIRED, 0.0, 0.1, 0.2))


def test_percentiles_are_values_that_occurred() -> None:
    found = percentiles(float(n) for n in range(100, 0, -1))
    assert (found.p50, found.p95, found.p99) == (50.0, 95.0, 99.0)
    assert percentiles([7.0]).p99 == 7.0
    assert percentiles([]).p50 is None


def test_objectives_are_parsed() -> None:
    slos = parse_slos(["interactive:ttft=0.3,latency=4", "bulk:latency=3600"])
    assert slos["interactive"] == Slo(0.3, 4.0)
    assert slos["bulk"] == Slo(latency_s=3600.0)
    assert slos["standard"] == DEFAULT_SLOS["standard"]


@pytest.mark.parametrize(
    "text", ["urgent:ttft=1", "bulk", "bulk:ttft", "bulk:ttft=0", "bulk:ttft=x", "bulk:itl=1"]
)
def test_invalid_objectives_are_rejected(text: str) -> None:
    with pytest.raises(SimulationError, match=text.split(":", maxsplit=1)[0]):
        parse_slos([text])
