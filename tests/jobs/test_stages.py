"""Long documents: split, answered in parts, and put together again."""

import json

import pytest
from grpc import StatusCode

from sluice import errors
from sluice.v1 import jobs_pb2 as pb
from tests.jobs.gateway_double import GatewayDouble
from tests.jobs.processes import Processes

MAP = pb.JobStage(name="map", template="MAP {text}", split_tokens=4)
REDUCE = pb.JobStage(name="reduce", template="REDUCE {parts}: {text}")


def documents(*texts: str) -> bytes:
    return b"".join(
        json.dumps({"id": f"d{n}", "prompt": text}).encode() + b"\n" for n, text in enumerate(texts)
    )


def words(count: int) -> str:
    return " ".join(f"w{n}" for n in range(count))


def shorter(prompt: str) -> str:
    """What a model makes of a prompt: its last word in brackets."""
    return f"<{prompt.split()[-1].strip('<>')}>"


async def stage(processes: Processes, job: str, number: int) -> list[pb.JobResult]:
    pages = await processes.ask("GetResults", pb.GetResultsRequest(id=job, stage=number))
    return [one for page in pages for one in page.results]


async def test_documents_are_split_and_put_together(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.answer = shorter
    job = await processes.create(documents(words(10), "one two"), stages=[MAP, REDUCE])
    job = await processes.ended(job.id)

    assert job.state == pb.JOB_STATE_COMPLETED, job.reason
    parts = await stage(processes, job.id, 0)
    assert [(one.custom_id, one.part, one.parts) for one in parts] == [
        ("d0", 0, 3), ("d0", 1, 3), ("d0", 2, 3), ("d1", 0, 1)
    ]  # fmt: skip
    assert "REDUCE 1: <w3>\n\n<w7>\n\n<w9>" in gateway.asked
    whole = await processes.results(job.id)
    assert [(one.index, one.custom_id, one.answer.text) for one in whole] == [
        (0, "d0", "<w9>"), (1, "d1", "<two>")
    ]  # fmt: skip
    shown = [(one.name, one.total, one.succeeded) for one in job.progress.stages]
    assert shown == [("map", 4, 4), ("reduce", 2, 2)]
    assert job.progress.completion_tokens == 2 * 6
    assert job.report.progress.cost == 0.5 * 6


async def test_answers_that_are_too_long_together_are_reduced_again(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.answer = shorter
    small = pb.JobStage(name="reduce", template="REDUCE {text}", split_tokens=3)
    job = await processes.create(documents(words(40), "one two"), stages=[MAP, small])
    job = await processes.ended(job.id)

    assert job.state == pb.JOB_STATE_COMPLETED, job.reason
    assert [one.total for one in job.progress.stages] == [11, 5, 3, 2]  # 10 parts, 4, 2, 1
    whole = await processes.results(job.id)
    assert [(one.custom_id, one.answer.text) for one in whole] == [("d0", "<w39>"), ("d1", "<two>")]
    assert sum(gateway.asked.values()) == 10 + 4 + 2 + 1 + 2, "what is whole is not reduced again"
    assert job.progress.completion_tokens == 2 * 19


async def test_a_document_with_a_part_that_fails_is_a_dead_letter(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.plan = lambda prompt, tries: (
        errors.SafetyBlocked("no") if prompt == "MAP  w4 w5 w6 w7" else None
    )
    data = documents(words(10), "one two") + b"nonsense\n"
    limits = pb.JobLimits(max_bad_line_share=1.0)
    job = await processes.create(data, stages=[MAP, REDUCE], limits=limits)
    job = await processes.ended(job.id)

    whole = await processes.results(job.id)
    assert [one.error.reason for one in whole] == ["SAFETY_BLOCKED", "", "BAD_LINE"]
    assert "part 2 of 3: no" in whole[0].error.message
    assert (job.progress.succeeded, job.progress.dead, job.progress.bad_lines) == (1, 2, 1)
    with pytest.raises(errors.WrongJobState, match="reuse_job_ids"):
        await processes.retry(job.id)


@pytest.mark.parametrize(
    ("code", "errors_in_a_row", "reasons"),
    [
        (StatusCode.DEADLINE_EXCEEDED, 3, [""]),
        (StatusCode.INTERNAL, 3, [""]),
        (StatusCode.INTERNAL, 4, ["INTERNAL"]),
        (StatusCode.UNAVAILABLE, 9, [""]),
    ],
)
async def test_texts_are_split_again_after_errors_that_may_pass(
    processes: Processes,
    gateway: GatewayDouble,
    monkeypatch: pytest.MonkeyPatch,
    code: StatusCode,
    errors_in_a_row: int,
    reasons: list[str],
) -> None:
    monkeypatch.setattr("jobs.stages.RETRY_AFTER_S", 0.0)
    gateway.split_errors = [code] * errors_in_a_row
    await processes.start()
    job = await processes.create(documents(words(3)), stages=[MAP, REDUCE])
    await processes.ended(job.id)
    assert [one.error.reason for one in await processes.results(job.id)] == reasons


async def test_answers_that_never_get_shorter_are_dead_letters(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.answer = lambda prompt: words(8)
    small = pb.JobStage(template="REDUCE {text}", split_tokens=4)
    job = await processes.create(documents(words(10)), stages=[MAP, small])
    job = await processes.ended(job.id)

    assert [one.error.reason for one in await processes.results(job.id)] == ["ANSWERS_TOO_LONG"]


async def test_a_template_without_room_for_a_text_fails_the_job(
    processes: Processes, gateway: GatewayDouble
) -> None:
    await processes.start()
    gateway.context = 3
    job = await processes.create(documents("one"), stages=[pb.JobStage(), REDUCE])
    stage_ = pb.JobStage(template="a b c d {text}")
    full = await processes.create(documents("one"), stages=[stage_, REDUCE])

    assert (await processes.ended(job.id)).state == pb.JOB_STATE_COMPLETED
    full = await processes.ended(full.id)
    assert (full.state, full.reason_code) == (pb.JOB_STATE_FAILED, "REQUEST_INVALID")
    assert "no tokens for a text" in full.reason


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([MAP], "name two or more"),
        ([MAP, pb.JobStage(template="no text")], "needs {text}"),
        ([MAP, pb.JobStage(split_tokens=2, overlap_tokens=2)], "less than split_tokens"),
    ],
)
async def test_stages_that_do_not_fit_are_refused(
    processes: Processes, stages: list[pb.JobStage], message: str
) -> None:
    await processes.start()
    with pytest.raises(errors.InvalidRequest, match=message):
        await processes.create(documents("one"), stages=stages)


async def test_a_killed_process_leaves_its_stage_to_another_one(
    processes: Processes, gateway: GatewayDouble
) -> None:
    first = await processes.start_real("one", window_items=8)
    gateway.answer = shorter
    job = await processes.create(documents(*[words(12)] * 200), stages=[MAP, REDUCE])
    await processes.when(job.id, lambda one: one.progress.stage == 1 and one.progress.succeeded > 0)
    await first.kill()
    await processes.start("two", window_items=8)
    job = await processes.ended(job.id)

    assert job.state == pb.JOB_STATE_COMPLETED
    whole = await processes.results(job.id)
    assert [one.custom_id for one in whole] == [f"d{n}" for n in range(200)]
    assert {one.answer.text for one in whole} == {"<w11>"}
    assert [one.succeeded for one in job.progress.stages] == [600, 200]
