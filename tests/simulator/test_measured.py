"""Files of measured costs, and a fit that finds what a trace was made with."""

import json
from dataclasses import replace

import pytest

from simulator.fleet import SHIPPED, ProcessCost
from simulator.measured import MeshCost, fit_load, parse_costs, simulated, times
from simulator.simulator import Links
from simulator.trace import SimulationError
from tests.simulator.kit import COST, LINKS, SHARING, setup, trace

DECODE = {"figure": "engine_cost", "phase": "decode", "fixed_ms": 4, "points": [[2, 50, 10.0]]}
PREFILL = {"figure": "engine_cost", "phase": "prefill", "points": [[16, 128.0, 3], [64, 2048, 9]]}


def test_lines_of_other_figures_are_skipped() -> None:
    lines = [
        json.dumps({"figure": "engine_vs_generate", "ours": 1}),
        "",
        json.dumps(DECODE),
        json.dumps(PREFILL),
    ]
    costs = parse_costs(lines * 4)
    assert costs.step(0, 2, 50) == pytest.approx(0.01, rel=0.01)
    assert costs.step(16, 0, 0, 128) == pytest.approx(0.003, rel=0.01)
    assert costs.step(64, 0, 0, 2048) == pytest.approx(0.009, rel=0.01)
    assert (costs.processes, costs.mesh) == (SHIPPED, None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "line 2: is not JSON"),
        ("[]", "line 2: is not a JSON object"),
        ('{"figure": "engine_cost", "points": []}', "line 2: phase is missing"),
        (json.dumps({**DECODE, "points": [[1, 2]]}), "line 2: points.0.2 is missing"),
        (
            json.dumps({**DECODE, "points": [[1, 2, 3], [1, -2, 3]]}),
            "line 2: points.1.1: -2: Input should be greater",
        ),
        ('{"figure": "mesh_cost"}', "line 2: step is missing"),
        ('{"figure": "process_cost_nats", "also": {}}', "line 2: also.request_us is missing"),
        (
            json.dumps({**DECODE, "points": [[1, 2, 0]]}),
            "line 2: points.0.2: 0: Input should be greater than 0",
        ),
    ],
)
def test_a_wrong_line_is_told_by_its_number(line: str, said: str) -> None:
    with pytest.raises(SimulationError) as raised:
        parse_costs([json.dumps(PREFILL), line])
    assert said in str(raised.value)


def test_a_measured_mesh_is_read_as_it_was_written() -> None:
    mesh = MeshCost(COST, 0.2, LINKS, SHARING)
    process = {"figure": "process_cost_nats", "ours": 7, "also": {"request_us": 5, "token_us": 1}}
    costs = parse_costs([json.dumps(DECODE), mesh.line(), json.dumps(process)])
    assert (costs.step, costs.error, costs.mesh) == (COST, 0.2, mesh)
    assert costs.processes == {**SHIPPED, "nats": ProcessCost(5.0, 1.0)}


def test_a_fit_finds_the_slowdown_and_the_ways() -> None:
    load = ("poisson:rate=25,class=interactive,prompt=100,answer=uniform/5/15",)
    told = setup(sharing=SHARING)
    given = replace(
        told, sharing=replace(SHARING, slowdown=0.0), links=Links(0.0, LINKS.send_s, 0.0)
    )
    found = fit_load(simulated(trace(*load, seconds=2.0), told), given)

    unseen = trace(*load, seconds=2.0, seed=2)
    said, true = times(simulated(unseen, found)), times(simulated(unseen, told))
    assert said == pytest.approx(true, rel=0.1)
    assert found.sharing is not None
    assert found.sharing.slowdown == pytest.approx(SHARING.slowdown, rel=0.25)
    assert found.links.in_s + found.links.out_s == pytest.approx(LINKS.in_s + LINKS.out_s, rel=0.25)


def test_a_trace_without_answers_cannot_be_fitted() -> None:
    with pytest.raises(SimulationError, match="nothing to fit"):
        fit_load(trace("poisson:rate=5,class=interactive,prompt=9,answer=3", seconds=1.0), setup())
