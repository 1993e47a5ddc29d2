"""OpenAI's files and batches as uploads and jobs, and the form in which a file arrives."""

from typing import Any

import pytest

from gateway.http import batches as objects
from gateway.http.multipart import FIELD_BYTES, FileForm
from sluice.errors import InvalidRequest, SluiceError, UploadUnknown
from sluice.openai.fields import BadField
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.inference_pb2 import PRIORITY_STANDARD
from sluice.wire.clock import timestamp, unix_ms

BODY = {
    "input_file_id": "file-upload-1",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\nline 1\r\nline 2\r\n\r\n--x--\r\n"
)


LONG = f"multipart/form-data; boundary={'x' * 300}"


def form(body: bytes, size: int = 7) -> tuple[FileForm, bytes]:
    made = FileForm("multipart/form-data; boundary=x")
    file = b"".join(made.feed(body[at : at + size]) for at in range(0, len(body), size))
    made.end()
    return made, file


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_file_is_taken_out_of_a_form(size: int) -> None:
    made, file = form(FORM, size)
    assert file == b"line 1\r\nline 2\r\n"
    assert (made.name, made.fields) == ("in.jsonl", {"purpose": "batch"})


def test_a_part_without_a_name_is_not_taken_for_the_one_before() -> None:
    made, file = form(FORM[:-7] + b"--x\r\nX: y\r\n\r\nmore\r\n--x--\r\n")
    assert (made.fields, file) == ({"purpose": "batch", "": "more"}, b"line 1\r\nline 2\r\n")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{}", "not a multipart form"),
        (FORM[:-9], "incomplete"),
        (FORM.replace(b'"file"', b'"text"'), "file: is required"),
        (FORM.replace(b"--x--\r\n", FORM), "file: is there twice"),
        (FORM.replace(b"batch", b"b" * (FIELD_BYTES + 1)), "purpose: the fields have over"),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 64 + FORM,
            "over 64 parts",
        ),
        (
            FORM.replace(b"Type: a", b"Type: " + b"a" * 9000),
            "not a multipart form with the boundary",
        ),
    ],
)
def test_what_is_no_form_with_a_file_says_why(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        form(body)


@pytest.mark.parametrize("text", ["", "0", "101", "-1", "٣", "9" * 5000])
def test_a_page_has_a_size(text: str) -> None:
    with pytest.raises(InvalidRequest, match="limit"):
        objects.page_limit(text, 100)


@pytest.mark.parametrize("content_type", ["", "text/plain", "multipart/form-data", LONG])
def test_a_form_has_a_type_and_a_boundary(content_type: str) -> None:
    with pytest.raises(InvalidRequest, match="content-type"):
        FileForm(content_type)


def test_a_batch_is_a_job() -> None:
    headers = {
        "x-sluice-label-task": "sum",
        "x-sluice-priority": "standard",
        "idempotency-key": "k",
    }
    body = {**BODY, "metadata": {"team": "a"}, "completion_window": "2h"}
    request = objects.create_request(body, headers, 1_000_000)
    spec = pb.JobSpec(
        name="/v1/chat/completions",
        labels={"task": "sum", "team": "a"},
        priority=PRIORITY_STANDARD,
        input=pb.JobInput(upload_id="upload-1", format=pb.JOB_INPUT_FORMAT_OPENAI),
    )
    spec.limits.deadline_time.CopyFrom(timestamp(8_200_000))
    spec.limits.max_bad_line_share = 1.0
    assert request == pb.CreateJobRequest(spec=spec, idempotency_key="k")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": []}}, "metadata.a"),
        ({"metadata": []}, "metadata"),
        ({"metadata": ""}, "metadata"),
        ({"output_expires_after": {}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "anchor"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "seconds"),
        ({"input_file_id": "upload-1"}, "file"),
    ],
)
def test_a_batch_with_a_wrong_field_names_it(changed: dict[str, Any], field: str) -> None:
    with pytest.raises((SluiceError, BadField), match=field):
        objects.create_request({**BODY, **changed}, {}, 0)


def test_a_job_that_is_over_has_files() -> None:
    job = pb.Job(id="job-1", state=pb.JOB_STATE_COMPLETED)
    job.spec.CopyFrom(objects.create_request(BODY, {}, 0).spec)
    job.progress.total, job.progress.succeeded, job.progress.dead = 3, 2, 1
    job.end_time.CopyFrom(timestamp(5_000))
    batch = objects.batch_object(job)
    assert (batch["id"], batch["status"], batch["completed_at"]) == ("batch_job-1", "completed", 5)
    assert (batch["failed_at"], batch["completion_window"]) == (None, "24h")
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert objects.job_of(batch["id"]) == "job-1"
    assert objects.result_file(batch["output_file_id"]) == ("job-1", objects.OUTPUT)
    assert objects.result_file(batch["error_file_id"]) == ("job-1", objects.ERRORS)
    assert objects.upload_of(batch["input_file_id"]) == "upload-1"
    with pytest.raises(UploadUnknown):
        objects.upload_of(batch["output_file_id"])


def test_files_of_results_have_bytes_and_expire() -> None:
    body = {**BODY, "output_expires_after": {"anchor": "created_at", "seconds": 3600}}
    job = pb.Job(id="job-1", state=pb.JOB_STATE_COMPLETED)
    job.spec.CopyFrom(objects.create_request(body, {}, 0).spec)
    assert job.spec.results_expire_after.seconds == 3600
    job.progress.CopyFrom(pb.JobProgress(succeeded=1, dead=1, output_bytes=300, error_bytes=20))
    for ended_ms, there in ((unix_ms(), True), (5_000, False)):
        job.end_time.CopyFrom(timestamp(ended_ms))
        job.results_expire_time.CopyFrom(timestamp(ended_ms + 3_600_000))
        batch = objects.batch_object(job)
        assert (batch["output_file_id"] is not None, batch["error_file_id"] is not None) == (
            there,
            there,
        )
    output = objects.result_object(job, "file-job-1-output")
    assert (output["bytes"], output["expires_at"]) == (300, 3605)
    assert objects.result_object(job, "file-job-1-errors")["bytes"] == 20


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (pb.JOB_STATE_CANCELLED, "cancelling"),
        (pb.JOB_STATE_EXPIRED, "finalizing"),
        (pb.JOB_STATE_FAILED, "finalizing"),
    ],
)
def test_job_that_is_being_closed_has_no_files(state: "pb.JobState.ValueType", status: str) -> None:
    job = pb.Job(id="job-1", state=state, closing=True)
    job.progress.succeeded = job.progress.dead = 1
    job.end_time.CopyFrom(timestamp(5_000))
    batch = objects.batch_object(job)
    assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == (
        status,
        None,
        None,
    )
    assert (batch["cancelled_at"], batch["expired_at"], batch["failed_at"]) == (None,) * 3
    job.closing = False
    batch = objects.batch_object(job)
    assert batch["status"] in ("cancelled", "expired", "failed")
    assert None not in (batch["output_file_id"], batch["error_file_id"])


def test_paused_job_has_its_answers_and_no_errors() -> None:
    job = pb.Job(id="job-1", state=pb.JOB_STATE_PAUSED)
    job.progress.succeeded = job.progress.dead = 1
    batch = objects.batch_object(job)
    assert (batch["output_file_id"], batch["error_file_id"]) == ("file-job-1-output", None)


def test_a_paused_job_says_what_to_do() -> None:
    job = pb.Job(state=pb.JOB_STATE_PAUSED, reason="raise max_cost", reason_code="COST")
    batch = objects.batch_object(job)
    assert (batch["status"], batch["output_file_id"]) == ("in_progress", None)
    assert batch["errors"]["data"][0]["message"] == "raise max_cost"
