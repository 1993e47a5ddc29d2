"""`sluice eval --golden`: the scores, what is compared, the floor."""

import json
from pathlib import Path

import pytest

from cli.golden import METRICS, Scored, difference, exact, f1
from tests.cli.commands import Cli
from tests.support.scripted_jobs import ScriptedJobs, answered, failed

ROWS = [
    {"id": "1", "prompt": "p1", "answer": "abc", "max_tokens": 9},
    {"id": "2", "messages": [{"role": "user", "content": "p2"}], "references": ["x y", "abc"]},
]


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    path = tmp_path / "golden.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def batch_file(path: Path, texts: dict[str, str]) -> Path:
    lines = [
        {
            "custom_id": custom_id,
            "response": {
                "status_code": 200,
                "body": {"choices": [{"message": {"content": text}}]},
            },
        }
        for custom_id, text in texts.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_words_are_compared_as_squad_does() -> None:
    assert exact("The cat.", "a Cat") == 1
    assert exact("cats", "cat") == 0
    assert f1("the red cat sat", "red cat") == pytest.approx(0.8)
    assert f1("", "") == 1
    assert f1("x", "") == 0


def test_bleu_and_rouge_are_those_of_their_packages() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    answers = ["the cat sat on the mat today", "it is raining in the town again"]
    references = [["the cat sat on a mat today", "a cat"], ["it is raining in town again"]]
    scored = Scored(answers, references)
    streams = [[refs[0] for refs in references], ["a cat", None]]
    assert scored.score("bleu") == pytest.approx(
        sacrebleu.corpus_bleu(answers, streams).score / 100
    )
    assert 0.8 < scored.score("rouge_l") < 1


def test_intervals_hold_the_score_and_chance_makes_no_difference() -> None:
    words = [f"w{n} x{n} y{n} z{n} q{n}" for n in range(60)]
    right = Scored(words, [[one] for one in words])
    half = Scored([one if n % 2 else "no" for n, one in enumerate(words)], [[one] for one in words])
    for metric in METRICS:
        assert right.interval(metric)["value"] == pytest.approx(1)
        found = half.interval(metric)
        assert found["low"] < found["value"] < found["high"]
        better = difference(half, right, metric)
        assert better["value"] > 0.3
        assert better["p"] < 0.01
        assert difference(right, right, metric)["p"] == 1


async def test_model_is_scored_by_a_job_and_fails_below_its_floor(cli: Cli, golden: Path) -> None:
    async with ScriptedJobs(found=[answered(0, "abc"), answered(1, "abc")]).serve() as jobs:
        words = ("eval", "--golden", str(golden), "--address", jobs.address)
        ran = await cli(*words, "-m", "small", "--json", "--floor", "exact=1", "--label", "a=b")
        low = await cli(*words, "--floor", "bleu=1.1")
        wrong = await cli(*words, "--floor", "speed=1")
    assert ran.code == 0, ran.err
    described = json.loads(ran.out)
    assert described["scores"]["small"]["exact"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert described["jobs"] == {"small": "job-1"}
    spec = jobs.created[0].spec
    assert (spec.model, dict(spec.labels), spec.limits.concurrency) == ("small", {"a": "b"}, 16)
    assert jobs.uploads["golden.jsonl"].splitlines() == [
        b'{"id": "1", "max_tokens": 9, "prompt": "p1"}',
        b'{"id": "2", "messages": [{"role": "user", "content": "p2"}]}',
    ]
    assert low.code == 1
    assert "BELOW_FLOOR: auto: bleu" in low.err
    assert "not METRIC=0.8" in wrong.err


async def test_two_models_are_compared(cli: Cli, golden: Path) -> None:
    async with ScriptedJobs(found=[answered(0, "abc"), answered(1, "no")]).serve() as jobs:
        ran = await cli(
            *("eval", "--golden", str(golden), "--compare", "small", "large"),
            *("--address", jobs.address),
        )
    assert ran.code == 0, ran.err
    assert "value:0 low:0 high:0 p:1" in ran.out
    assert "large are kept: sluice batch results job-1 --out FILE" in ran.out
    assert [one.spec.model for one in jobs.created] == ["small", "large"]


async def test_a_question_without_an_answer_fails_the_command(cli: Cli, golden: Path) -> None:
    async with ScriptedJobs(found=[answered(0, "abc"), failed(1)]).serve() as jobs:
        ran = await cli("eval", "--golden", str(golden), "--address", jobs.address)
    assert ran.code == 1
    assert "UNANSWERED: 1 of 2 questions got no answer (job-1): is too long" in ran.err


async def test_two_releases_are_compared_by_their_files(
    cli: Cli, golden: Path, tmp_path: Path
) -> None:
    old = batch_file(tmp_path / "old.jsonl", {"1": "abc", "2": "no"})
    new = batch_file(tmp_path / "new.jsonl", {"2": "x y", "1": "abc"})
    ran = await cli("eval", "--golden", str(golden), "--compare", str(old), str(new))
    assert ran.code == 0, ran.err
    assert "value:0.5 " in ran.out
    batch_file(new, {"1": "abc"})
    ran = await cli("eval", "--golden", str(golden), "--compare", str(old), str(new))
    assert "UNANSWERED" in ran.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSONL"),
        ('{"prompt": "a"}', "line 1: answer"),
        ('{"answer": "a"}', "no prompt"),
        (
            '{"id": 1, "prompt": "a", "answer": "a"}\n{"id": 1, "prompt": "a", "answer": "a"}',
            "not unique",
        ),
        ("", "no questions"),
    ],
)
async def test_a_bad_file_is_told_before_anything_is_asked(
    cli: Cli, tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "golden.jsonl"
    path.write_text(content)
    ran = await cli("eval", "--golden", str(path), "--address", "127.0.0.1:1")
    assert ran.code == 1
    assert said in ran.err
