"""`sluice router`: from outcomes to a router, to scores."""

import csv
import gzip
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

from learning.outcomes import RouterOutcome
from tests.cli.commands import Cli
from tests.learning.made_up import HARD, outcomes


def write(path: Path, rows: Sequence[RouterOutcome]) -> Path:
    columns = ("prompt_id", "prompt", "weak", "strong", "weak_response")
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows((r.prompt_id, r.prompt, r.weak, r.strong, r.answer or "") for r in rows)
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


async def test_train_and_score(cli: Cli, tmp_path: Path) -> None:
    table = write(tmp_path / "outcomes.csv.gz", outcomes(60))
    trained = await cli("router", "train", str(table), "--out", str(tmp_path / "r"), "--json")
    assert trained.code == 0, trained.err
    told = json.loads(trained.out)
    assert told["heads"]["prompts"]["rows"] == 60
    assert told["bytes"] == (tmp_path / "r").stat().st_size < 20_000_000

    scores = tmp_path / "scores.csv"
    scored = await cli("router", "score", str(tmp_path / "r"), str(table), "--out", str(scores))
    assert scored.code == 0, scored.err
    with scores.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["prompt_id"] for row in rows] == [row.prompt_id for row in outcomes(60)]
    by_kind: dict[bool, list[float]] = {True: [], False: []}
    for outcome, row in zip(outcomes(60), rows, strict=True):
        by_kind[outcome.prompt.startswith(HARD)].append(float(row["score"]))
    assert min(by_kind[True]) > max(by_kind[False])


async def test_cascade(cli: Cli, tmp_path: Path) -> None:
    table = write(tmp_path / "outcomes.csv", outcomes(60, answers=True))
    router, scores = tmp_path / "r", tmp_path / "s.csv"
    trained = await cli("router", "train", str(table), "--out", str(router), "--cascade")
    assert trained.code == 0, trained.err
    assert trained.out.count("rows 60") == 2
    scored = await cli(
        "router", "score", str(router), str(table), "--out", str(scores), "--cascade"
    )
    assert scored.code == 0, scored.err
    with scores.open() as file:
        given = [float(row["score"]) for row in csv.DictReader(file)]
    wrong = [
        score for score, row in zip(given, outcomes(60, answers=True), strict=True) if not row.weak
    ]
    right = [
        score for score, row in zip(given, outcomes(60, answers=True), strict=True) if row.weak
    ]
    assert sum(wrong) / len(wrong) > sum(right) / len(right) + 0.2


async def test_answers_are_asked_for(cli: Cli, tmp_path: Path) -> None:
    table = write(tmp_path / "outcomes.csv", outcomes(40))
    router = tmp_path / "r"
    refused = await cli("router", "train", str(table), "--out", str(router), "--cascade")
    assert refused.code == 1
    assert "BAD_OUTCOMES: --cascade needs weak_response in every row; 'p0' has none" in refused.err
    assert not router.exists()
    assert (await cli("router", "train", str(table), "--out", str(router))).code == 0
    words = ("router", "score", str(router), str(table), "--out", str(tmp_path / "s"), "--cascade")
    refused = await cli(*words)
    assert refused.code == 1
    assert "NO_CASCADE_HEAD" in refused.err


async def test_bad_input_names_the_row_and_leaves_the_old_router(cli: Cli, tmp_path: Path) -> None:
    router = tmp_path / "r"
    router.write_text("the old one")
    rows = outcomes(40)
    table = write(tmp_path / "outcomes.csv", [*rows, rows[4]])
    refused = await cli("router", "train", str(table), "--out", str(router))
    assert refused.code == 1
    assert "outcomes.csv row 42: prompt_id 'p4' is already in outcomes.csv row 6" in refused.err
    assert router.read_text() == "the old one"
    scores = tmp_path / "s.csv"
    refused = await cli("router", "score", str(router), str(table), "--out", str(scores))
    assert refused.code == 1
    assert "BAD_ROUTER" in refused.err
    assert not scores.exists()


async def test_prompts_are_checked(cli: Cli, tmp_path: Path) -> None:
    table = write(tmp_path / "outcomes.csv", outcomes(40))
    router, prompts, scores = tmp_path / "r", tmp_path / "p.csv", tmp_path / "s.csv"
    assert (await cli("router", "train", str(table), "--out", str(router))).code == 0
    for text, message in (
        ("prompt_id,text\na,b\n", "p.csv row 1: no column prompt"),
        ("prompt_id,prompt\na,b\na,c\n", "p.csv row 3: prompt_id 'a' comes twice"),
        ("prompt_id,prompt\na,\n", "p.csv row 2: prompt is empty"),
    ):
        prompts.write_text(text)
        refused = await cli("router", "score", str(router), str(prompts), "--out", str(scores))
        assert (refused.code, scores.exists()) == (1, False)
        assert f"BAD_PROMPTS: {message}" in refused.err
    assert sorted(os.listdir(tmp_path)) == ["outcomes.csv", "p.csv", "r"]


async def test_files_that_cannot_be_read(cli: Cli, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "r"))
    missing = await cli("router", "train", str(tmp_path / "none.csv"), *out)
    assert missing.code == 1
    assert "FILE: " in missing.err
    table = write(tmp_path / "outcomes.csv.gz", outcomes(40))
    table.write_bytes(table.read_bytes()[:200])
    cut = await cli("router", "train", str(table), *out)
    assert cut.code == 1
    assert "is no CSV file in UTF-8" in cut.err
    latin = tmp_path / "latin.csv"
    latin.write_bytes(b"prompt_id,prompt,weak,strong\na,caf\xe9,1,0\n")
    assert "is no CSV file in UTF-8" in (await cli("router", "train", str(latin), *out)).err
