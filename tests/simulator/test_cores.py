"""Cores that all share: equal parts, slower together, and a simulation in which requests and steps take them."""

from dataclasses import replace

import pytest

from simulator.cores import Alarm, Cores, EventQueue, Sharing
from simulator.results import Ending, History
from simulator.simulator import simulate
from tests.simulator.kit import COST, LINKS, SHARING, arrival, setup, trace

MIXED = (
    "poisson:rate=8,class=interactive,lengths=desk,timeout_s=3",
    "flood:count=30,class=bulk,lengths=desk,tenant=b",
)


def done_at(sharing: Sharing, *work: tuple[float, float]) -> list[float]:
    """When each piece of work is done, that comes at a time and takes so long."""
    events = EventQueue()
    cores, found = Cores(sharing, events), dict.fromkeys(range(len(work)), 0.0)
    for number, (at, seconds) in enumerate(work):
        events.at(
            at,
            lambda number=number, seconds=seconds: cores.work(
                seconds, lambda: found.update({number: events.now})
            ),
        )
    while events.next_at() is not None:
        events.step()
    return list(found.values())


@pytest.mark.parametrize(
    ("cores", "slowdown", "work", "done"),
    [
        (2, 0.0, [(0, 1), (0, 2)], [1, 2]),
        (1, 0.0, [(0, 1), (0, 2)], [2, 3]),
        (2, 0.0, [(0, 1), (0, 1), (0, 1)], [1.5, 1.5, 1.5]),
        (1, 0.0, [(0, 2), (1, 0.5)], [2.5, 2]),
        (2, 0.5, [(0, 1), (0, 2)], [1.5, 2.5]),
        (2, 0.5, [(0, 1), (5, 1)], [1, 6]),
        (4, 0.6, [(0, 1), (0, 1)], [1.2, 1.2]),
        (1, 9.0, [(0, 1)], [1]),
    ],
)
def test_who_has_work_gets_an_equal_part(
    cores: int, slowdown: float, work: list[tuple[float, float]], done: list[float]
) -> None:
    assert done_at(Sharing(cores, 0, 0, 0, slowdown), *work) == pytest.approx(done)


def test_an_alarm_rings_once_at_the_earliest_time() -> None:
    events, rung = EventQueue(), list[float]()
    alarm = Alarm(events, lambda: rung.append(events.now))
    for times in ((3.0, 2.0, 5.0), (7.0,)):
        for at in times:
            alarm.set(at)
        while events.next_at() is not None:
            events.step()
    assert rung == [2.0, 7.0]


def test_the_time_of_one_request_has_what_it_costs_all_processes() -> None:
    request = arrival(1.0, prompt=100, answer=1, priority_class="interactive")
    (outcome,) = simulate([request], setup(sharing=SHARING)).outcomes
    ways = LINKS.in_s + LINKS.send_s + LINKS.out_s
    work = SHARING.request_s / 2 + COST(100, 0, 0) + SHARING.report_s + SHARING.token_s
    assert outcome.ttft_s == pytest.approx(ways + work)


def played(sharing: Sharing) -> History:
    return simulate(trace(*MIXED, seconds=6.0), setup(sharing=sharing))


def test_every_request_ends_and_runs_are_reproducible() -> None:
    first, second = played(SHARING), played(SHARING)
    assert first == second
    assert {outcome.ending for outcome in first.outcomes} <= {Ending.FINISHED, Ending.EXPIRED}
    for outcome in first.outcomes:
        if outcome.ending is Ending.FINISHED:
            assert 0 < (outcome.ttft_s or 0) <= (outcome.latency_s or 0)


def test_steps_take_longer_beside_the_other_processes() -> None:
    alone, free, slow = (
        played(sharing).busy_s
        for sharing in (replace(SHARING, step_share=0.0), replace(SHARING, slowdown=0.0), SHARING)
    )
    assert alone < free < slow


def test_steps_during_a_report_share_the_next_one() -> None:
    sharing = replace(SHARING, report_s=20 * COST(0, 1, 100), token_s=0.0)
    request = arrival(0.0, answer=100, priority_class="interactive")
    (outcome,) = simulate([request], setup(sharing=sharing)).outcomes
    assert outcome.latency_s is not None
    assert outcome.latency_s < 20 * sharing.report_s, (
        "one for each token would take five times that"
    )


def test_gathered_tokens_need_no_report_of_their_own() -> None:
    sharing = replace(SHARING, report_s=1.0)
    request = arrival(0.0, answer=20, priority_class="bulk")
    (outcome,) = simulate([request], setup(sharing=sharing)).outcomes
    assert outcome.latency_s is not None
    assert outcome.latency_s < 3.0, "its first token and its end"
