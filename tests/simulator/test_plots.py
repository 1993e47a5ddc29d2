"""The pictures are written, with a panel for what there is; without matplotlib that is said."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from simulator import plots
from simulator.planner import SPEEDS, sweep
from simulator.results import DEFAULT_SLOS
from simulator.simulator import simulate
from simulator.trace import SimulationError
from tests.simulator.kit import setup, trace

PNG = b"\x89PNG\r\n"


def test_both_pictures_are_written(tmp_path: Path) -> None:
    streams = ("poisson:rate=5,class=interactive,lengths=desk", "flood:count=20,class=bulk")
    requests = trace(*streams, seconds=5.0)
    setups = {name: setup(name) for name in ("fixed", "continuous")}
    load, queue = tmp_path / "load.png", tmp_path / "queue.png"
    plots.plot_load({n: sweep(requests, s, DEFAULT_SLOS) for n, s in setups.items()}, load)
    plots.plot_queue({n: simulate(requests, s) for n, s in setups.items()}, queue)
    for file in (load, queue):
        assert file.read_bytes().startswith(PNG)
        assert file.stat().st_size > 10_000


def test_a_sweep_plays_the_trace_at_every_speed() -> None:
    requests = trace("poisson:rate=4,lengths=desk")
    points = sweep(requests, setup(), DEFAULT_SLOS)
    assert [p.speed for p in points] == list(SPEEDS)
    assert points[0].summary.tokens_per_s < points[3].summary.tokens_per_s
    assert {p.summary.classes[0].finished for p in points} == {len(requests)}


def test_without_matplotlib_what_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SimulationError, match=r"pip install .matplotlib>=3\.9,<4."):
        plots.check()
