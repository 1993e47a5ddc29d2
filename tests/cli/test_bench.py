"""`sluice bench`: finds the benchmarks of the tree, passes failures on, and prints figures in the agreed form."""

from pathlib import Path

import pytest

from bench.support.harness import compare
from cli import bench
from cli.main import run


def test_the_benchmarks_of_the_tree_are_known() -> None:
    assert {"engine", "mesh", "simulation", "tails"} <= set(bench.benchmark_names())


def test_an_unknown_benchmark_is_told_with_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "nonsense"]) == 1
    said = capsys.readouterr().err
    assert "BENCHMARK_UNKNOWN" in said
    assert "mesh" in said


@pytest.mark.parametrize("code", [0, 3])
def test_arguments_and_the_exit_code_are_passed_on(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"import sys, pathlib\npathlib.Path({str(tmp_path / 'said')!r}).write_text(' '.join(sys.argv[1:]))\n"
    (tmp_path / "one.py").write_text(f"{script}sys.exit({code})\n")
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    words = ["bench", "one", "--runs", "7", "--json", "--own", "x"]
    assert run(words) == (0 if code == 0 else 1)
    assert (tmp_path / "said").read_text() == "--runs 7 --json --own x"


async def test_a_comparison_interleaves_and_takes_medians() -> None:
    order: list[str] = []
    ours, peer = iter([9.0, 1.0, 5.0, 3.0, 7.0, 2.0]), iter([9.0, 2.0, 2.0, 2.0, 4.0, 1.0])

    async def run_ours() -> float:
        order.append("ours")
        return next(ours)

    async def run_peer() -> float:
        order.append("peer")
        return next(peer)

    figure = await compare(
        "x", run_ours, run_peer, unit="tokens/s", higher_is_better=True, note="n", runs=5
    )
    assert order == ["ours", "peer"] + ["ours", "peer", "peer", "ours"] * 2 + ["ours", "peer"]
    assert (figure.ours, figure.peer, figure.ratio) == (3.0, 2.0, 1.75)
