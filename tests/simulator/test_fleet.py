"""Processes for a load: costs from measured points, head-room, a failed zone, and what the error makes of it."""

import pytest

from bench.support.pages import load_results
from bench.support.record import RESULTS
from simulator.fleet import SHIPPED, ProcessCost, Sizing, fleets

COST = ProcessCost(1000.0, 10.0, 100.0, 0.0)


def test_without_zones_and_headroom_it_is_the_load_itself() -> None:
    (found,) = fleets(2000.0, 100.0, Sizing(0.0, 1), {"gateway": COST})

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
    (found,) = fleets(100_000.0, 1.0, Sizing(), {"batcher": COST})

    assert found.low < found.processes < found.high


@pytest.mark.parametrize(("zones", "servers"), [(1, 1), (2, 2), (3, 2), (5, 2)])
def test_message_passes_servers_of_sender_and_reader(zones: int, servers: int) -> None:
    sizing = Sizing(0.3, zones)
    gateway, nats = (fleets(1.0, 1.0, sizing, {name: COST})[0] for name in ("gateway", "nats"))

    assert nats.needed == pytest.approx(servers * gateway.needed / 4), (
        "of four cores, stored nowhere"
    )


def test_the_shipped_costs_are_those_of_the_results() -> None:
    lines = load_results(RESULTS)
    found = {
        name: one[-1]["also"] for name, one in lines.items() if name.startswith("process_cost_")
    }
    assert set(found) == {f"process_cost_{name}" for name in SHIPPED}
    for name, cost in SHIPPED.items():
        also = found[f"process_cost_{name}"]
        assert cost.request_us == pytest.approx(also["request_us"], rel=0.02), name
        assert cost.token_us == pytest.approx(also["token_us"], rel=0.02), name
