"""OpenAI's files and batches are uploads and jobs: what the names and fields of one are in the other.

A file is an upload (``file-upload-...``), or the results of a job that is over: its answers (``file-job-...-output``)
or its dead letters (``file-job-...-errors``), which are made when they are read.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gateway.http.requests import IDEMPOTENCY_KEY, PRIORITY, class_of, labels_of
from sluice.errors import InvalidRequest, JobUnknown, UploadUnknown
from sluice.openai.embeddings import EMBEDDINGS
from sluice.openai.requests import URLS
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.inference_pb2 import Priority
from sluice.wire.clock import timestamp
from sluice.wire.enums import value_of

Json = dict[str, Any]

FILE: Final = "file-"
BATCH: Final = "batch_"
OUTPUT: Final = "-output"
ERRORS: Final = "-errors"
PURPOSE: Final = "batch"
RESULTS: Final = "batch_output"
"""The purpose of files of results."""
BATCHES_MAX: Final = 100
FILES_MAX: Final = 10_000
"""The longest pages of the lists."""
_ENDPOINTS: Final = (*URLS, EMBEDDINGS)
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,3})h")
_STATUS: Final = {
    pb.JOB_STATE_QUEUED: "validating",
    pb.JOB_STATE_RUNNING: "in_progress",
    pb.JOB_STATE_PAUSED: "in_progress",  # OpenAI has no word for it; `errors` says what to do
    pb.JOB_STATE_COMPLETED: "completed",
    pb.JOB_STATE_FAILED: "failed",
    pb.JOB_STATE_CANCELLED: "cancelled",
    pb.JOB_STATE_EXPIRED: "expired",
}
_ENDS: Final = ("completed", "failed", "cancelled", "expired")


def upload_of(file_id: str) -> str:
    """The upload that a file is.

    Raises:
        UploadUnknown: it is none.
    """
    upload = file_id.removeprefix(FILE)
    if upload == file_id or result_file(file_id) is not None:
        raise UploadUnknown(f"there is no uploaded file {file_id!r}")
    return upload


def result_file(file_id: str) -> tuple[str, str] | None:
    """The job whose results a file is, with `OUTPUT` or `ERRORS`; None for others."""
    for part in (OUTPUT, ERRORS):
        if file_id.startswith(FILE) and file_id.endswith(part):
            return file_id.removeprefix(FILE).removesuffix(part), part
    return None


def job_of(batch_id: str) -> str:
    """The job that a batch is.

    Raises:
        JobUnknown: it is none.
    """
    if not batch_id.startswith(BATCH):
        raise JobUnknown(f"there is no batch {batch_id!r}")
    return batch_id.removeprefix(BATCH)


def file_object(
    file_id: str, name: str, size_bytes: int | None, created: int, purpose: str = PURPOSE
) -> Json:
    """A file; ``created``: in seconds since 1970. The size of results is not known before they are read."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": size_bytes,
        "created_at": created,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
    }


def create_request(
    body: Mapping[str, Any], headers: Mapping[str, str], now_unix_ms: int
) -> pb.CreateJobRequest:
    """The job that the body of a new batch asks for.

    Raises:
        InvalidRequest: a field is not served, or its value does not fit.
    """
    given = {name: value for name, value in body.items() if value is not None}
    file_id, endpoint = _text(given, "input_file_id"), _text(given, "endpoint")
    if endpoint not in _ENDPOINTS:
        raise InvalidRequest.of("endpoint", f"must be one of {', '.join(_ENDPOINTS)}")
    window = _WINDOW.fullmatch(_text(given, "completion_window"))
    if window is None:
        raise InvalidRequest.of("completion_window", 'must be a number of hours, such as "24h"')
    labels = given.pop("metadata", {})
    if not isinstance(labels, dict) or not all(isinstance(one, str) for one in labels.values()):
        raise InvalidRequest.of("metadata", "must be an object of strings")
    if given:
        raise InvalidRequest.of(min(given), "is not served")
    # The name keeps the endpoint for `batch_object`; each line of the file names its own.
    spec = pb.JobSpec(name=endpoint, labels={**labels, **labels_of(headers)})
    if PRIORITY in headers:
        spec.priority = value_of(Priority, class_of(headers))
    spec.input.upload_id = upload_of(file_id)
    spec.input.format = pb.JOB_INPUT_FORMAT_OPENAI
    end = now_unix_ms + int(window[1]) * 3_600_000
    spec.limits.deadline_time.CopyFrom(timestamp(end))
    # Nobody resumes a batch of OpenAI's API: lines that are no items go into its error file, however many there are.
    spec.limits.max_bad_line_share = 1.0
    key = headers.get(IDEMPOTENCY_KEY, "")
    return pb.CreateJobRequest(spec=spec, idempotency_key=key)


def page_limit(text: str, most: int) -> int:
    """How many entries a page has.

    Raises:
        InvalidRequest: ``text`` says none, or more than ``most``.
    """
    if not (re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= most):
        raise InvalidRequest.of("limit", f"must be 1 to {most}")
    return int(text)


def file_page(files: Iterable[Json], query: Mapping[str, str]) -> Json:
    """The page of ``files`` that ``query`` asks for.

    Raises:
        InvalidRequest: a parameter is not served, or its value does not fit.
        UploadUnknown: there is no file ``after``.
    """
    if unknown := query.keys() - {"purpose", "limit", "order", "after"}:
        raise InvalidRequest.of(min(unknown), "is not served")
    limit = page_limit(query.get("limit") or str(FILES_MAX), FILES_MAX)
    if (order := query.get("order") or "desc") not in ("asc", "desc"):
        raise InvalidRequest.of("order", "must be asc or desc")
    wanted = query.get("purpose")
    kept = [one for one in files if not wanted or wanted == one["purpose"]]
    kept.sort(
        key=lambda one: (one["created_at"], one["purpose"], one["id"]), reverse=order == "desc"
    )
    if after := query.get("after"):
        places = {one["id"]: place for place, one in enumerate(kept)}
        if after not in places:
            raise UploadUnknown(f"after: there is no file {after!r} in this list")
        kept = kept[places[after] + 1 :]
    return list_object(kept[:limit], has_more=len(kept) > limit)


def list_object(data: Sequence[Json], *, has_more: bool) -> Json:
    """A page of a list."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": has_more, **ends}


def result_files(job: pb.Job) -> list[Json]:
    """The files of results that a job has."""
    batch = batch_object(job)
    named = (batch["output_file_id"], batch["error_file_id"])
    return [result_object(job, file_id) for file_id in named if file_id is not None]


def result_object(job: pb.Job, file_id: str) -> Json:
    """A file of results."""
    return file_object(file_id, f"{file_id}.jsonl", None, job.end_time.seconds, RESULTS)


def batch_object(job: pb.Job) -> Json:
    """A job as a batch."""
    status, progress, spec = _STATUS[job.state], job.progress, job.spec
    ended = job.end_time.seconds if job.HasField("end_time") else None
    over = status in _ENDS
    file_id = f"{FILE}{job.id}"
    return {
        "id": f"{BATCH}{job.id}",
        "object": "batch",
        "endpoint": spec.name if spec.name in _ENDPOINTS else URLS[0],
        "errors": _errors(job),
        "input_file_id": f"{FILE}{spec.input.upload_id}",
        "completion_window": _window(job),
        "status": status,
        "output_file_id": file_id + OUTPUT if over and progress.succeeded else None,
        "error_file_id": file_id + ERRORS if over and progress.dead else None,
        "created_at": job.create_time.seconds,
        "in_progress_at": job.start_time.seconds if job.HasField("start_time") else None,
        "expires_at": spec.limits.deadline_time.seconds or None,
        "finalizing_at": None,
        "cancelling_at": ended if status == "cancelled" else None,
        **{f"{end}_at": ended if status == end else None for end in _ENDS},
        "request_counts": {
            "total": progress.total,
            "completed": progress.succeeded,
            "failed": progress.dead,
        },
        "metadata": dict(spec.labels),
    }


def _errors(job: pb.Job) -> Json | None:
    """Why a job failed or waits for a person."""
    if not job.reason or job.state not in (pb.JOB_STATE_FAILED, pb.JOB_STATE_PAUSED):
        return None
    error = {"code": job.reason_code.lower(), "message": job.reason, "param": None, "line": None}
    return {"object": "list", "data": [error]}


def _window(job: pb.Job) -> str:
    seconds = job.spec.limits.deadline_time.seconds - job.create_time.seconds
    return f"{round(seconds / 3600)}h" if seconds > 0 else "24h"


def _text(given: dict[str, Any], name: str) -> str:
    value = given.pop(name, None)
    if not isinstance(value, str):
        raise InvalidRequest.of(name, "must be there, a string")
    return value
