"""`sluice batch`: what it asks, what it prints and writes, how it ends."""

import json
import os
import time
from pathlib import Path

import pytest

from cli.batch_view import display, sentence
from sluice.v1 import jobs_pb2 as pb
from tests.cli.commands import Cli
from tests.support.scripted_jobs import ScriptedJobs, answered, failed

INPUT = b'{"id": "i0", "prompt": "a"}\n{"id": "i1", "prompt": "b"}\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(INPUT)
    return path


async def test_submit_uploads_the_file_and_prints_the_job(cli: Cli, source: Path) -> None:
    async with ScriptedJobs().serve() as jobs:
        ran = await cli(
            *("batch", "submit", str(source), "--json", "--address", jobs.address),
            *("--model", "small", "--max-tokens", "9", "--label", "a=b", "--max-cost", "1.5"),
            *("--format", "openai", "--deadline", "60", "--timeout", "5", "--max-retries", "0"),
            *("--max-bad-lines", "0.5", "--key", "nightly"),
        )
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out)["id"] == "job-1"
    assert jobs.uploads == {"in.jsonl": INPUT}
    (request,) = jobs.created
    assert request.idempotency_key == "nightly"
    spec = request.spec
    assert (spec.model, spec.sampling.max_tokens, dict(spec.labels)) == ("small", 9, {"a": "b"})
    assert spec.input == pb.JobInput(upload_id="upload-in.jsonl", format=pb.JOB_INPUT_FORMAT_OPENAI)
    assert (spec.limits.max_cost, spec.limits.max_bad_line_share) == (1.5, 0.5)
    assert spec.limits.item_timeout.seconds == 5
    assert spec.limits.deadline_time.ToMilliseconds() > time.time() * 1e3
    assert (spec.retries.max_retries, spec.retries.HasField("max_retries")) == (0, True)


async def test_documents_are_split_and_reduced(cli: Cli, source: Path) -> None:
    words = ("batch", "submit", str(source))
    async with ScriptedJobs().serve() as jobs:
        ran = await cli(
            *(*words, "--address", jobs.address, "--split", "200", "--overlap", "20"),
            *("--map", "Sum up: {text}", "--reduce", "Join: {text}", "--reuse", "job-0"),
        )
        alone = await cli(*words, "--address", jobs.address, "--split", "200")
    assert (ran.code, ran.err) == (0, "")
    (request,) = jobs.created
    assert list(request.spec.stages) == [
        pb.JobStage(name="map", template="Sum up: {text}", split_tokens=200, overlap_tokens=20),
        pb.JobStage(name="reduce", template="Join: {text}"),
    ]
    assert list(request.spec.dedupe.reuse_job_ids) == ["job-0"]
    assert alone.code != 0
    assert "--reduce" in alone.err


async def test_what_the_mesh_reads_itself_is_named(cli: Cli) -> None:
    async with ScriptedJobs().serve() as jobs:
        ran = await cli("batch", "submit", "s3://bucket/in.csv", "--address", jobs.address)
    assert ran.code == 0
    assert jobs.created[0].spec.input == pb.JobInput(url="s3://bucket/in.csv")


async def test_messages_of_a_subject_are_an_input(cli: Cli, source: Path) -> None:
    ends = ("--messages", "9", "--idle", "1.5", "--from-sequence", "4")
    async with ScriptedJobs().serve() as jobs:
        ran = await cli("batch", "submit", "nats://a.*.b", *ends, "--address", jobs.address)
        of_file = await cli("batch", "submit", str(source), *ends, "--address", jobs.address)
    assert ran.code == 0
    given = pb.JobInput(nats_subject="a.*.b", nats_message_count=9, nats_start_sequence=4)
    given.nats_idle.FromMilliseconds(1500)
    assert jobs.created[0].spec.input == given
    assert of_file.code != 0
    assert "nats://SUBJECT" in of_file.err


async def test_watch_shows_the_progress_and_out_gets_the_results(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    async with ScriptedJobs(found=[answered(0, "A"), answered(1, "B")], breaks=2).serve() as jobs:
        ran = await cli(
            *("batch", "submit", str(source), "--out", str(out), "--watch"),
            *("--address", jobs.address),
        )
    assert ran.code == 0, ran.err
    assert (
        "job-1: running · 2/2 done · 0 failed · 0:01:01 left · 2.5 items/s · 70 tokens/s" in ran.err
    )
    assert "completed" in ran.out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["i0", "i1"]
    assert lines[0]["response"]["body"]["choices"][0]["message"]["content"] == "A"
    assert set(os.listdir(tmp_path)) == {"in.jsonl", "out.jsonl"}


def test_on_a_terminal_the_progress_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    job = pb.Job(id="job-1", state=pb.JOB_STATE_RUNNING)
    with display(True) as show:
        for done in (1, 2):
            job.progress.succeeded = done
            show(job)
    _, first, second = capsys.readouterr().err.split("\r\x1b[K")
    assert first.startswith("job-1: running · 1/0+ done")
    assert len(second) <= 40
    assert second.endswith("\n")


async def test_dead_letters_fail_the_command_unless_they_are_allowed(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    async with ScriptedJobs(found=[answered(0, "A"), failed(1)]).serve() as jobs:
        words = ("batch", "submit", str(source), "--out", str(out), "--address", jobs.address)
        ran = await cli(*words)
        allowed = await cli(*words, "--max-dead", "1")
    assert ran.code == 1
    assert "DEAD_LETTERS: 1 of 2 items failed: sluice batch dead-letters job-1" in ran.err
    assert len(out.read_text().splitlines()) == 2
    assert allowed.code == 0


async def test_a_job_that_needs_a_person_says_what_to_do(cli: Cli, source: Path) -> None:
    states = (pb.JOB_STATE_RUNNING, pb.JOB_STATE_PAUSED)
    async with ScriptedJobs(states, reason="raise its maximum cost").serve() as jobs:
        ran = await cli(
            "batch", "submit", str(source), "--wait", "--json", "--address", jobs.address
        )
    assert ran.code == 1
    described = json.loads(ran.out)
    assert described["state"] == "paused"
    message = "job-1 is paused: raise its maximum cost; then: sluice batch resume job-1"
    assert described["error"]["message"] == message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "NO_SUCH_FILE"),
        (b"", "INPUT_EMPTY"),
        (b"hello\n", "NOT_JSONL"),
        (b'[{"prompt": "a"}]', "NOT_JSONL"),
    ],
)
async def test_a_file_that_cannot_be_a_job_is_not_sent(
    cli: Cli, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_bytes(content)
    async with ScriptedJobs().serve() as jobs:
        ran = await cli("batch", "submit", str(path), "--address", jobs.address)
    assert ran.code == 1
    assert f"sluice: {reason}: {path}" in ran.err
    assert not jobs.uploads


async def test_unwritable_output_fails_before_the_job_is_created(
    cli: Cli, source: Path, tmp_path: Path
) -> None:
    async with ScriptedJobs().serve() as jobs:
        for out in (tmp_path / "none" / "out.jsonl", tmp_path):
            ran = await cli(
                "batch", "submit", str(source), "--out", str(out), "--address", jobs.address
            )
            assert ran.code == 1
            assert "OUTPUT_NOT_WRITABLE" in ran.err
    assert not jobs.created


@pytest.mark.parametrize(("known", "said"), [(False, "· 0:01:30+ left"), (True, "· 0:01:30 left")])
def test_eta_is_a_minimum_while_the_input_is_read(known: bool, said: str) -> None:
    job = pb.Job(state=pb.JOB_STATE_RUNNING)
    job.progress.total, job.progress.total_final = 1536, known
    job.progress.remaining.seconds = 90
    assert said in sentence(job)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_says_where_the_results_are(cli: Cli, source: Path) -> None:
    async with ScriptedJobs(found=[answered(0, "A")]).serve() as jobs:
        ran = await cli(
            "batch", "submit", str(source), "--out", "/dev/full", "--address", jobs.address
        )
    assert ran.code == 1
    assert "DISK_FULL" in ran.err
    assert "sluice batch results job-1 --out FILE" in ran.err


async def test_an_unknown_model_is_the_error_of_the_mesh(cli: Cli, source: Path) -> None:
    async with ScriptedJobs().serve() as jobs:
        ran = await cli("batch", "submit", str(source), "-m", "huge", "--address", jobs.address)
    assert ran.code == 1
    assert "sluice: MODEL_UNKNOWN: no model huge; there are small, large" in ran.err


async def test_results_go_on_where_a_stream_broke(cli: Cli) -> None:
    found = [answered(0, "A"), failed(1), failed(2, "BAD_LINE", 0), answered(3, "D")]
    async with ScriptedJobs(found=found, breaks=3).serve() as jobs:
        ran = await cli("batch", "results", "job-1", "--address", jobs.address)
    assert ran.code == 0
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["custom_id"] for line in lines] == ["i0", "i1", "i2", "i3"]
    assert [asked.from_index for asked in jobs.asked] == [0, 1, 2, 3]
    assert lines[1]["response"]["status_code"] == 400
    assert lines[1]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert lines[2]["response"] is None
    assert lines[2]["error"] == {"code": "BAD_LINE", "message": "line 3: is too long"}


async def test_the_other_commands(cli: Cli) -> None:
    found = [answered(0, "A"), failed(1)]
    async with ScriptedJobs(found=found).serve() as jobs:

        async def ask(*words: str) -> str:
            ran = await cli("batch", *words, "--address", jobs.address)
            assert ran.code == 0, ran.err
            return ran.out

        assert json.loads(await ask("status", "job-1", "--json"))["progress"]["succeeded"] == 1
        assert "completed" in await ask("status", "job-1")
        assert len(json.loads(await ask("list", "--state", "running", "--json"))["jobs"]) == 2
        assert jobs.asked[0].states == [pb.JOB_STATE_RUNNING]
        assert "PROMPT_TOO_LONG" in await ask("dead-letters", "job-1")
        assert json.loads(await ask("dead-letters", "job-1", "--json"))["custom_id"] == "i1"
        assert "2 items" in await ask("retry", "job-1", "--reason", "ENGINE_FAILED")
        assert jobs.asked[-1].reasons == ["ENGINE_FAILED"]
        assert "paused" in await ask("pause", "job-1")
        assert "running" in await ask("resume", "job-1", "--max-cost", "3")
        assert jobs.asked[-1].limits.max_cost == 3
        assert json.loads(await ask("cancel", "job-1", "--json"))["state"] == "cancelled"
        assert json.loads(await ask("delete", "job-1", "--json"))["deleted"]
        ran = await cli("batch", "list", "--state", "lost", "--address", jobs.address)
    assert ran.code == 2
    assert "unknown state 'lost'; use one of queued, running" in ran.err


async def test_status_shows_the_report(cli: Cli) -> None:
    report = pb.JobReport(workers_busy_share=0.751, padding_share=0.2)
    async with ScriptedJobs(report=report).serve() as jobs:
        shown = await cli("batch", "status", "job-1", "--address", jobs.address)
        listed = await cli("batch", "status", "job-1", "--address", jobs.address, "--json")
    assert "  padding_share 0.2\n" in shown.out
    assert json.loads(listed.out)["report"]["padding_share"] == 0.2


async def test_list_shows_when_jobs_began_and_ended(cli: Cli, tmp_path: Path) -> None:
    async with ScriptedJobs().serve() as jobs:
        shown = await cli("batch", "list", "--address", jobs.address)
        out = tmp_path / "out.jsonl"
        wrote = await cli("batch", "results", "job-1", "--out", str(out), "--address", jobs.address)
    assert shown.out.split()[:5] == ["job", "name", "state", "created", "finished"]
    assert shown.out.splitlines()[-1] == "2 completed"
    lines = len(out.read_text().splitlines())
    assert wrote.out == f"wrote {lines} lines to {out}\n"
    assert max(map(len, shown.out.splitlines())) <= 100
