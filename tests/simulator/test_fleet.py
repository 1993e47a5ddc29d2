"""Processes for a load: costs from measured points, head-room, a failed zone, and what the error makes of it."""

import json

import pytest

from bench.support.pages import load_results
from bench.support.record import RESULTS
from simulator.fleet import FIGURE, SHIPPED, ProcessCost, Sizing, fit_process, fleets, parse_costs
from simulator.trace import SimulationError

COST = ProcessCost(1000.0, 10.0, 100.0, 0.0)


def test_without_zones_and_headroom_it_is_the_load_itself() -> None:
    (found,) = fleets(2000.0, 100.0, {"gateway": COST}, Sizing(0.0, 1))

    # 2,000 requests of 2 ms of a core.
    assert (found.needed, found.processes) == (pytest.approx(4.0), 4)
    assert found.error == pytest.approx(0.05)


@pytest.mark.parametrize("zones", [2, 3, 5])
def test_processes_of_all_zones_but_one_have_the_headroom(zones: int) -> None:
    for needed in (0.01, 1.0, 17.3, 400.0):
        processes = Sizing(0.3, zones).processes(needed)

        assert processes % zones == 0
        assert needed <= 0.7 * processes * (zones - 1) / zones + 1e-9
        smaller = processes - zones
        assert not smaller or needed > 0.7 * smaller * (zones - 1) / zones


def test_the_error_widens_the_count() -> None:
    (found,) = fleets(100_000.0, 1.0, {"batcher": COST}, Sizing())

    assert found.low < found.processes < found.high


def test_nats_servers_store_each_task_three_times() -> None:
    one, three = (fleets(1.0, 1.0, {name: COST}, Sizing())[0] for name in ("gateway", "nats"))

    assert three.needed * 4 == pytest.approx(one.needed * 3)


def test_a_fit_finds_the_line_and_says_how_far_the_points_are_from_it() -> None:
    exact = fit_process([(1, 110.0), (10, 200.0), (50, 600.0)])
    spread = fit_process([(1, 110.0), (10, 260.0), (50, 600.0), (50, 500.0)])

    assert (exact.request_us, exact.token_us) == (pytest.approx(100.0), pytest.approx(10.0))
    assert exact.request_error_us == pytest.approx(0.0, abs=1e-6)
    assert spread.request_error_us > 10.0


@pytest.mark.parametrize("points", [[(1, 1.0), (2, 2.0)], [(1, 1.0)] * 5])
def test_too_few_points_are_an_error(points: list[tuple[float, float]]) -> None:
    with pytest.raises(SimulationError, match="three points and two lengths"):
        fit_process(points)


def test_a_file_of_costs() -> None:
    also = {"request_us": 1, "token_us": 2, "request_error_us": 3, "token_error_us": 4}
    lines = [json.dumps({"figure": f"{FIGURE}nats", "also": also}), "", '{"figure": "other"}']

    assert parse_costs(lines) == {"nats": ProcessCost(1.0, 2.0, 3.0, 4.0)}


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "line 1"), ('{"figure": "process_cost_nats"}', "line 1"), ("[]", "line 1"), ("", "no line")],
)  # fmt: skip
def test_a_file_without_costs_is_an_error(line: str, said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        parse_costs([line])


def test_the_shipped_costs_are_those_of_the_results() -> None:
    lines = load_results(RESULTS)["cpu-2-cores"]
    measured = [json.dumps(line) for name, line in lines.items() if name.startswith(FIGURE)]

    found = parse_costs(measured)

    assert set(found) == set(SHIPPED)
    for name, cost in SHIPPED.items():
        assert cost.request_us == pytest.approx(found[name].request_us, rel=0.02), name
        assert cost.token_us == pytest.approx(found[name].token_us, rel=0.02), name
