"""`sluice eval`: every question to every model, graded and added up."""

import csv
import json
import os
import re
from pathlib import Path

import pytest

from cli.failure import CommandFailed
from cli.questions import of_file
from model_workers.tiers.example import CELLS
from model_workers.tiers.tasks import generate, heldout
from sluice import errors
from tests.cli.commands import Cli
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
    assert lines[0][:5] == ["model", "kind", "level", "n", "right_share"]
    totals = [line[0] for line in lines if line[1:3] == ["all", "all"]]
    assert totals[:3] == ["small", "large", "auto"]
    assert "token_share" in ran.out
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


async def test_labels_and_consent_travel(cli: Cli) -> None:
    script = [started(), delta(0, "x"), finished(1)]
    async with ScriptedService.serve([script]) as service:
        ran = await cli(
            *("eval", "--n", "1", "-m", "auto", "--label", "policy=careful", "--accept-replace"),
            *("--address", service.address),
        )
    assert ran.code == 0, ran.err
    assert all(dict(r.labels) == {"policy": "careful"} for r in service.requests)
    assert all(r.accept_replace for r in service.requests)


async def test_outcomes_are_those_of_training_questions(cli: Cli, tmp_path: Path) -> None:
    script = [started(), delta(0, "so, so"), finished(6)]
    table = tmp_path / "outcomes.csv"
    async with ScriptedService.serve([script]) as service:
        ran = await cli(
            *("eval", "--n", "2", "--seed", "3", "--outcomes", str(table), "--weak", "tiny"),
            *("--address", service.address),
        )
    assert ran.code == 0, ran.err
    assert f"{table}: {2 * len(CELLS)} rows" in ran.out
    assert {r.model for r in service.requests} == {"tiny", "large"}
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["prompt_id", "prompt", "weak", "strong", "weak_response"]
    prompts = {e.prompt for cell in CELLS for e in generate(3, 2, cell, "train")}
    assert {row["prompt"] for row in rows} == prompts == {r.prompt for r in service.requests}
    assert len({row["prompt_id"] for row in rows}) == len(rows)
    assert {(r["weak"], r["strong"], r["weak_response"]) for r in rows} == {("0", "0", "so, so")}


async def test_outcomes_have_the_rows_that_were_answered(cli: Cli, tmp_path: Path) -> None:
    script = [started(), delta(0, "x"), finished(1)]
    table = tmp_path / "outcomes.csv"
    async with ScriptedService.serve([[Fail(errors.EngineFailed("row lost"))], script]) as service:
        ran = await cli(
            *("eval", "--n", "1", "--outcomes", str(table), "--json"),
            *("--address", service.address),
        )
    assert ran.code == 1
    assert json.loads(ran.out)["rows"] == len(CELLS) - 1
    with table.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(CELLS) - 1


async def test_without_an_answer_the_old_outcomes_stay(cli: Cli, tmp_path: Path) -> None:
    table = tmp_path / "outcomes.csv"
    table.write_text("the old ones")
    async with ScriptedService.serve([[Fail(errors.EngineFailed("row lost"))]]) as service:
        ran = await cli(
            *("eval", "--n", "1", "--outcomes", str(table), "--address", service.address)
        )
    assert ran.code == 1
    assert table.read_text() == "the old ones"
    assert os.listdir(tmp_path) == ["outcomes.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--outcomes", "{}/none/o.csv"], "OUTPUT_NOT_WRITABLE: {}/none/o.csv cannot be written"),
        (["--outcomes", "{}/o.csv", "-m", "small"], "USAGE: --outcomes asks --weak and --strong"),
        (["--outcomes", "{}/o.csv", "--weak", "large"], "USAGE: --outcomes asks"),
        (["--questions", "{}/none.csv"], "FILE: {}/none.csv cannot be read"),
        (["--label", "x"], "USAGE: Invalid value for --label"),
    ],
)
async def test_what_cannot_be_done_is_told_before_anything_is_asked(
    cli: Cli, tmp_path: Path, arguments: list[str], message: str
) -> None:
    async with ScriptedService.serve([[]]) as service:
        ran = await cli(
            "eval", *(a.format(tmp_path) for a in arguments), "--address", service.address
        )
    assert ran.code != 0
    assert message.format(tmp_path) in ran.err
    assert not service.requests
    assert os.listdir(tmp_path) == []


async def test_own_questions(cli: Cli, tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text('prompt,answer,kind,max_tokens\nSay x," x ",talk,7\nSay y,y,,\n')
    script = [started(), delta(0, "x"), finished(1)]
    async with ScriptedService.serve([script]) as service:
        ran = await cli(
            *("eval", "--questions", str(table), "-m", "small", "--json"),
            *("--address", service.address),
        )
    assert ran.code == 0, ran.err
    cells = [(s["kind"], s["level"], s["right_share"]) for s in json.loads(ran.out)["scores"]]
    assert cells == [("talk", "-", 1.0), ("own", "-", 0.0), ("all", "all", 0.5)]
    asked = {r.prompt: r.sampling.max_tokens for r in service.requests}
    assert asked == {"Say x": 7, "Say y": 0}


async def test_conversations_are_questions_too_and_no_outcomes(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    turns = [{"role": "user", "content": "Say x"}]
    file.write_text(json.dumps({"messages": turns, "references": ["y", "x "], "id": "a"}) + "\n")
    script = [started(), delta(0, "x"), finished(1)]
    async with ScriptedService.serve([script]) as service:
        words = ("eval", "--questions", str(file), "--address", service.address)
        ran = await cli(*words, "-m", "small", "--json")
        refused = await cli(*words, "--outcomes", str(tmp_path / "o.csv"))
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["scores"][-1]["right_share"] == 1
    assert [turn.content for turn in service.requests[0].chat.messages] == ["Say x"]
    assert "BAD_QUESTIONS: question 1: outcomes are of prompts" in refused.err
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt\na\n", "own.csv row 2: answer, reference or references is no text"),
        ("prompt,answer\n", "own.csv: no questions; the file needs at least one"),
        ("prompt,answer\na,b\n ,b\n", "own.csv row 3: has no prompt and no messages"),
        ("prompt,answer\na\n", "own.csv row 2: answer, reference or references is no text"),
        (
            "prompt,answer,prompt_id\na,b,1\na,b,1\n",
            "own.csv row 3: id '1' is not unique; give each question its own id",
        ),
        ("prompt,answer,max_tokens\na,b,-1\n", "own.csv row 2: max_tokens is '-1', not a number"),
    ],
)
def test_questions_are_checked(text: str, message: str, tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text(text)
    with pytest.raises(CommandFailed, match=re.escape(message)):
        of_file(table)
