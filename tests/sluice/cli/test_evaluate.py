"""`sluice eval`: every question to every model, graded and added up."""

import json

import pytest

from model_workers.desk.example import CELLS
from model_workers.desk.tasks import heldout
from sluice import errors
from sluice.cli.scores import Result, tabulate
from tests.sluice.cli.commands import Cli
from tests.support.scripted import Fail, ScriptedService, delta, finished, started


async def test_right_answers_are_counted(cli: Cli) -> None:
    right = next(e for e in heldout(1, 3) if (e.kind, e.level) == ("sort", "easy"))
    script = [started(), delta(0, right.answer), finished(len(right.answer))]
    async with ScriptedService.serve([script]) as service:
        ran = await cli(
            *("eval", "--n", "1", "--seed", "3", "--model", "small", "--json"),
            *("--address", service.address),
        )
    assert ran.code == 0
    report = json.loads(ran.out)
    assert (report["n"], report["seed"]) == (1, 3)
    shares = {(s["kind"], s["level"]): s["right_share"] for s in report["scores"]}
    assert shares["sort", "easy"] == 1.0
    assert shares["total", "hard"] == 0.0
    assert shares["all", "all"] == pytest.approx(1 / len(CELLS))
    assert sorted(r.prompt for r in service.requests) == sorted(e.prompt for e in heldout(1, 3))
    assert all(r.sampling.temperature == 0 for r in service.requests)


async def test_all_models_and_auto_are_asked_by_default(cli: Cli) -> None:
    script = [started(), delta(0, "x"), finished(1)]
    async with ScriptedService.serve([script]) as service:
        ran = await cli("eval", "--n", "1", "--address", service.address)
    assert ran.code == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[0][:5] == ["model", "kind", "level", "n", "right"]
    totals = [line[0] for line in lines if line[1:3] == ["all", "all"]]
    assert totals == ["small", "large", "auto"]
    assert {r.model for r in service.requests} == {"small", "large", "auto"}


async def test_question_without_an_answer_fails_the_command(cli: Cli) -> None:
    script = [started(), delta(0, "x"), finished(1)]
    async with ScriptedService.serve([[Fail(errors.EngineFailed("row lost"))], script]) as service:
        ran = await cli("eval", "--n", "1", "-m", "small", "--json", "--address", service.address)
    assert ran.code == 1
    report = json.loads(ran.out)
    assert report["error"]["reason"] == "UNANSWERED"
    assert report["scores"][-1]["errors"] == 1
    assert f"1 of {len(CELLS)} questions got no answer: ENGINE_FAILED: row lost" in ran.err


def test_scores_of_cells_and_models() -> None:
    results = [
        Result("auto", "sort", "easy", True, "small", tokens=4, latency_s=0.1),
        Result("auto", "sort", "easy", False, "large", tokens=6, latency_s=0.3),
        Result("auto", "total", "hard", error="ENGINE_FAILED: row lost"),
    ]
    sort, total, whole = tabulate(results)
    assert sort.cells() == (
        "auto",
        "sort",
        "easy",
        "2",
        "50.0%",
        "10",
        "200",
        "large:1 small:1",
    )
    assert total.cells()[4:] == ("0.0%", "0", "-", "")
    assert (whole.kind, len(whole.results)) == ("all", 3)
    assert whole.right_share == pytest.approx(1 / 3)
