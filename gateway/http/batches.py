"""Serve /v1/files and /v1/batches on top of `sluice.v1.JobService`: a batch is a job, a file an upload or results.

A file id names an upload (`file-upload-...`), the answers of a finished job (`file-job-...-output`) or its dead
letters (`file-job-...-errors`). Files of results are generated when they are read.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final, Literal

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from pydantic import Field

from gateway.admission.arrivals import Arrivals
from gateway.admission.turns import TenantSlots
from gateway.api.job_forwarder import JobForwarder, errors_of_jobs
from gateway.http.call import HttpCall
from gateway.http.multipart import FileForm
from gateway.http.names import IDEMPOTENCY_KEY, BodyKind, FieldNames
from gateway.http.requests import PRIORITY, class_of, labels_of
from sluice.client.openai_lines import encoded_line
from sluice.errors import InvalidRequest, JobUnknown, SluiceError, UploadUnknown
from sluice.openai.bodies import Part, read
from sluice.openai.embeddings import EMBEDDINGS
from sluice.openai.requests import URLS, labels_of_metadata
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.inference_pb2 import Priority
from sluice.wire.clock import ms_of, timestamp, unix_ms
from sluice.wire.enums import value_of, word_of
from sluice.wire.job_calls import page_key

Json = dict[str, Any]

JOBS_S: Final = 30.0
"""Timeout of a call to `jobs`, in seconds."""
UPLOAD_S: Final = 3600.0
"""Timeout of an upload or of reading results, in seconds."""
PIECE_BYTES: Final = 512 * 1024
"""Largest piece of an upload that JobService accepts."""
_LINES: Final = {"content-type": "application/jsonl"}
FILE: Final = "file-"
BATCH: Final = "batch_"
OUTPUT: Final = "-output"
ERRORS: Final = "-errors"
PURPOSE: Final = "batch"
RESULTS: Final = "batch_output"
"""Purpose of files of results."""
BATCHES_MAX: Final = 100
FILES_MAX: Final = 10_000
"""Most entries on a page of batches and of files."""
LIST_PAGE: Final = 100
"""Jobs or uploads that a list reads in one call: 100 jobs with full labels take 1 MB."""
LISTS_MAX: Final = 8
"""Most lists that are read at the same time, because each holds its entries in memory."""
LISTS_OWN: Final = 2
"""Most lists of one tenant that are read at the same time."""
OVER: Final = (
    pb.JOB_STATE_COMPLETED,
    pb.JOB_STATE_FAILED,
    pb.JOB_STATE_CANCELLED,
    pb.JOB_STATE_EXPIRED,
)
"""States of jobs whose files are listed; the output of a paused job is not, but can be read."""
EXPIRY_S_MIN: Final = 3600
EXPIRY_S_MAX: Final = 30 * 24 * 3600
"""Bounds of the retention of files, in seconds; OpenAI's."""
_ENDPOINTS: Final = (*URLS, EMBEDDINGS)
_STATUS: Final = {
    "queued": "validating",
    "running": "in_progress",
    "paused": "in_progress",  # OpenAI has no such status; `errors` says what to do
}
"""OpenAI's status where it differs from the state of the job."""
_ENDS: Final = ("completed", "failed", "cancelled", "expired")


_REMEDIES: Final = {"completion_window": 'must be a number of hours, such as "24h"'}


class _Expiry(Part):
    """The retention of a file."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRY_S_MIN, le=EXPIRY_S_MAX)


class _BatchBody(Part):
    """The body of a new batch."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: str = Field(pattern="^[1-9][0-9]{0,3}h$")
    metadata: Any = None
    output_expires_after: _Expiry | None = None


class JobCalls:
    """The calls about files and batches; each method serves one route."""

    def __init__(self, jobs: JobForwarder, arrivals: Arrivals) -> None:
        self._jobs = jobs
        self._arrivals = arrivals
        self._lists = TenantSlots(LISTS_MAX, own=LISTS_OWN)

    async def upload(self, call: HttpCall) -> Json:
        """Store a file while it arrives."""
        form = FileForm(call.metadata.get("content-type", ""))
        with self._arrivals.uploads.hold(call.caller.tenant), errors_of_jobs():
            storing = self._jobs.begin(call, "UploadInput", wait_s=UPLOAD_S)
            try:
                # A wrong form, or a client that leaves, ends the call to jobs as well.
                await _send(call, form, storing)
                stored = await storing
            finally:
                storing.cancel()
        file_id, now = FILE + stored.upload_id, int(time.time())
        return file_object(
            file_id, form.name, stored.size_bytes, now, expires=stored.expire_time.seconds
        )

    async def file(self, call: HttpCall) -> Json:
        """Return a file's description."""
        file_id = call.path_params["id"]
        if result := result_file(file_id):
            return result_object(await self._job_with_file(call, *result), file_id)
        request = pb.GetUploadRequest(upload_id=upload_of(file_id))
        return _upload_object(request.upload_id, await self._call(call, "GetUpload", request))

    async def files(self, call: HttpCall) -> Json:
        """Return a page of the tenant's files: uploads and results of finished batches."""
        purpose, files = call.query_params.get("purpose"), list[Json]()
        async with self._lists.hold_slot(call.caller.tenant):
            if purpose in (None, "", PURPOSE):
                async for upload in self._all(call, "uploads", pb.ListUploadsRequest()):
                    files.append(_upload_object(upload.upload_id, upload))
            if purpose in (None, "", RESULTS):
                async for job in self._all(call, "jobs", pb.ListJobsRequest(states=OVER)):
                    batch = batch_object(job)
                    for file_id in (batch["output_file_id"], batch["error_file_id"]):
                        if file_id is not None:
                            files.append(result_object(job, file_id))
            return file_page(files, call.query_params)

    async def delete(self, call: HttpCall) -> Json:
        """Delete an upload."""
        file_id = call.path_params["id"]
        if result := result_file(file_id):
            raise InvalidRequest.of(
                "id", f"results are deleted with their job: `sluice batch delete {result[0]}`"
            )
        request = pb.DeleteUploadRequest(upload_id=upload_of(file_id))
        await self._call(call, "DeleteUpload", request)
        return {"id": file_id, "object": "file", "deleted": True}

    async def content(self, call: HttpCall) -> None:
        """Write the lines of a file of results, in the order of the input."""
        result = result_file(call.path_params["id"])
        if result is None:
            raise UploadUnknown("only output and error files of batches can be read")
        job, part = result
        method, request = (
            ("GetResults", pb.GetResultsRequest(id=job))
            if part == OUTPUT
            else ("ListDeadLetters", pb.ListDeadLettersRequest(id=job))
        )
        with errors_of_jobs(), call.while_connected():
            await self._job_with_file(call, job, part)
            pages = self._jobs.begin(call, method, request, wait_s=UPLOAD_S)
            try:
                async for page in pages:
                    lines = [
                        encoded_line(job, result)
                        for result in page.results
                        if result.HasField("answer") or part == ERRORS
                    ]
                    await call.write(b"".join(lines), _LINES, more=True)
            finally:
                pages.cancel()
        await call.write(b"", _LINES)

    async def create(self, call: HttpCall) -> Json:
        """Create a batch."""
        body = await call.object()
        call.named = FieldNames(BodyKind.BATCH, body)
        request = create_request(body, call.metadata, unix_ms())
        return await self._batch(call, "CreateJob", request)

    async def batch(self, call: HttpCall) -> Json:
        """Return a batch."""
        job = job_of(call.path_params["id"])
        return await self._batch(call, "GetJob", pb.GetJobRequest(id=job))

    async def cancel(self, call: HttpCall) -> Json:
        """Cancel a batch."""
        job = job_of(call.path_params["id"])
        return await self._batch(call, "CancelJob", pb.CancelJobRequest(id=job))

    async def batches(self, call: HttpCall) -> Json:
        """Return a page of the tenant's batches, newest first."""
        query = {"limit": "20", **call.query_params}
        check_query(query, "limit", "after")
        limit = page_limit(query["limit"] or str(BATCHES_MAX), BATCHES_MAX)
        request, jobs = pb.ListJobsRequest(), list[Json]()
        async with self._lists.hold_slot(call.caller.tenant):
            if after := query.get("after"):
                request.page_token = await self._token_after(call, after)
            while len(jobs) < limit:
                # jobs may return fewer entries than asked for, so pages are read until the limit is reached.
                request.page_size = limit - len(jobs)
                listed: pb.ListJobsResponse = await self._call(call, "ListJobs", request)
                jobs += map(batch_object, listed.jobs)
                request.page_token = listed.next_page_token
                if not listed.next_page_token:
                    break
            return list_object(jobs, has_more=bool(request.page_token))

    async def _token_after(self, call: HttpCall, batch: str) -> str:
        """Return the token of the page that begins after `batch`.

        Raises:
            JobUnknown: There is no such batch.
        """
        try:
            request = pb.GetJobRequest(id=job_of(batch))
            job: pb.Job = (await self._call(call, "GetJob", request)).job
        except JobUnknown:
            raise _after_unknown(batch) from None
        return page_key(job.create_time.ToMilliseconds(), job.id)

    async def _job_with_file(self, call: HttpCall, job_id: str, part: str) -> pb.Job:
        """Return the job of a file of results: it has ended, or is paused and the file is its output.

        Raises:
            UploadUnknown: The file does not exist yet, or has expired.
        """
        job: pb.Job = (await self._call(call, "GetJob", pb.GetJobRequest(id=job_id))).job
        has_ended = job.HasField("end_time") and not job.closing
        has_output = job.state == pb.JOB_STATE_PAUSED and part == OUTPUT
        if not (has_ended or has_output):
            raise UploadUnknown("the batch has not ended; its files exist when it has")
        if _is_expired(job):
            raise UploadUnknown("the files of the batch have expired")
        return job

    async def _batch(self, call: HttpCall, method: str, request: Message) -> Json:
        return batch_object((await self._call(call, method, request)).job)

    async def _call(self, call: HttpCall, method: str, request: Message) -> Any:
        """Call JobService for the caller of `call`, and return its response."""
        with errors_of_jobs():
            return await self._jobs.begin(call, method, request, wait_s=JOBS_S)

    async def _all(self, call: HttpCall, kind: str, request: Any) -> AsyncIterator[Any]:
        """Yield the entries of all pages of a list; `kind` is jobs or uploads."""
        request.page_size = LIST_PAGE
        while True:
            page = await self._call(call, f"List{kind.title()}", request)
            for entry in getattr(page, kind):
                yield entry
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


async def _send(call: HttpCall, form: FileForm, storing: Any) -> None:
    async for data in call.pieces():
        piece = form.feed(data)
        with suppress(
            asyncio.InvalidStateError
        ):  # the call has failed; awaiting it raises the error
            for start in range(0, len(piece), PIECE_BYTES):
                part = piece[start : start + PIECE_BYTES]
                await storing.write(pb.UploadInputRequest(name=form.name, data=part))
        if storing.done():  # jobs refused the upload: the rest of the body need not be read
            return
    form.end()
    fields = dict(form.fields)
    expiry = {name: fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds")}
    if fields != {"purpose": PURPOSE}:
        wrong = min(fields.keys() - {"purpose"}, default="purpose")
        raise InvalidRequest.of(wrong, 'send purpose with the value "batch", and no other field')
    if any(expiry.values()):
        seconds = expiry["seconds"] or ""
        expiry_fields = {
            **expiry,
            "seconds": int(seconds) if re.fullmatch("[0-9]{1,9}", seconds) else None,
        }
        after = read(_Expiry, expiry_fields, "expires_after")
        with suppress(asyncio.InvalidStateError):
            await storing.write(
                pb.UploadInputRequest(expires_after=Duration(seconds=after.seconds))
            )
    await storing.done_writing()


def upload_of(file_id: str) -> str:
    """Return the id of the upload with this file id.

    Raises:
        UploadUnknown: It is not the id of an upload.
    """
    upload = file_id.removeprefix(FILE)
    if upload == file_id or result_file(file_id) is not None:
        raise UploadUnknown(f"there is no uploaded file {file_id!r}")
    return upload


def result_file(file_id: str) -> tuple[str, str] | None:
    """Return the id of the job of a file of results, with `OUTPUT` or `ERRORS`; None for other files."""
    for part in (OUTPUT, ERRORS):
        if file_id.startswith(FILE) and file_id.endswith(part):
            return file_id.removeprefix(FILE).removesuffix(part), part
    return None


def job_of(batch_id: str) -> str:
    """Return the id of the job with this batch id.

    Raises:
        JobUnknown: It is not the id of a batch.
    """
    if not batch_id.startswith(BATCH):
        raise JobUnknown(f"there is no batch {batch_id!r}")
    return batch_id.removeprefix(BATCH)


def file_object(
    file_id: str,
    name: str,
    size_bytes: int,
    created: int,
    purpose: str = PURPOSE,
    expires: int = 0,
) -> Json:
    """Return a file as OpenAI has it; times are in seconds since the Unix epoch, `expires` is 0 if it never does."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": size_bytes,
        "created_at": created,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        **({"expires_at": expires} if expires else {}),
    }


def create_request(
    body: Mapping[str, Any], headers: Mapping[str, str], now_unix_ms: int
) -> pb.CreateJobRequest:
    """Return the request for a job that the body of a new batch describes.

    Raises:
        BadField: A field is unsupported, or its value is invalid.
        InvalidRequest: A header is invalid.
        UploadUnknown: The input is not the id of an upload.
    """
    fields = read(_BatchBody, body, remedies=_REMEDIES)
    labels = labels_of_metadata({} if fields.metadata is None else fields.metadata)
    # `batch_object` reads the endpoint from the name. Jobs do not need it: each line of the file has its own.
    spec = pb.JobSpec(name=fields.endpoint, labels={**labels, **labels_of(headers)})
    if PRIORITY in headers:  # otherwise jobs choose the class
        spec.priority = value_of(Priority, class_of(headers))
    spec.input.upload_id = upload_of(fields.input_file_id)
    if fields.output_expires_after is not None:
        spec.results_expire_after.seconds = fields.output_expires_after.seconds
    spec.input.format = pb.JOB_INPUT_FORMAT_OPENAI
    # OpenAI's completion window becomes the deadline of the job.
    end = now_unix_ms + int(fields.completion_window.removesuffix("h")) * 3_600_000
    spec.limits.deadline_time.CopyFrom(timestamp(end))
    # A batch cannot be resumed by OpenAI's API, so it must not pause: all invalid lines go into the error file.
    spec.limits.max_bad_line_share = 1.0
    key = headers.get(IDEMPOTENCY_KEY, "")
    return pb.CreateJobRequest(spec=spec, idempotency_key=key)


def check_query(query: Mapping[str, str], *names: str) -> None:
    """Raise InvalidRequest for a parameter other than `names`."""
    if unknown := query.keys() - {*names}:
        raise InvalidRequest.of(min(unknown), "is not supported; leave it out")


def list_object(data: list[Json], *, has_more: bool) -> Json:
    """Return a page of a list as OpenAI has it."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": has_more, **ends}


def _after_unknown(after: str) -> SluiceError:
    unknown, kind = (JobUnknown, "batch") if after.startswith(BATCH) else (UploadUnknown, "file")
    return unknown(f"after: there is no {kind} {after!r} in this list")


def page_limit(text: str, limit_max: int) -> int:
    """Return the number of entries of a page.

    Raises:
        InvalidRequest: `text` is not a number from 1 to `limit_max`.
    """
    if not (re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= limit_max):
        raise InvalidRequest.of("limit", f"must be 1 to {limit_max}")
    return int(text)


def file_page(files: list[Json], query: Mapping[str, str]) -> Json:
    """Return the page of `files` that `query` selects.

    Raises:
        InvalidRequest: A parameter is unsupported, or its value is invalid.
        UploadUnknown: There is no file `after`.
    """
    check_query(query, "limit", "after", "purpose", "order")
    if (order := query.get("order") or "desc") not in ("asc", "desc"):
        raise InvalidRequest.of("order", "must be asc or desc")
    purpose = query.get("purpose")
    selected = [file for file in files if not purpose or purpose == file["purpose"]]
    selected.sort(
        key=lambda file: (file["created_at"], file["purpose"], file["id"]), reverse=order == "desc"
    )
    limit = page_limit(query.get("limit") or str(FILES_MAX), FILES_MAX)
    if after := query.get("after"):
        ids = [entry["id"] for entry in selected]
        if after not in ids:
            raise _after_unknown(after)
        selected = selected[ids.index(after) + 1 :]
    return list_object(selected[:limit], has_more=len(selected) > limit)


def _upload_object(upload_id: str, upload: Any) -> Json:
    created, expires = upload.create_time.seconds, upload.expire_time.seconds
    return file_object(FILE + upload_id, upload.name, upload.size_bytes, created, expires=expires)


def result_object(job: pb.Job, file_id: str) -> Json:
    """Return a file of results as OpenAI has it; its size was counted when the results were written."""
    progress = job.progress
    size = progress.output_bytes if file_id.endswith(OUTPUT) else progress.error_bytes
    created = job.end_time.seconds or job.state_time.seconds
    expires = job.results_expire_time.seconds
    return file_object(file_id, f"{file_id}.jsonl", size, created, RESULTS, expires)


def batch_object(job: pb.Job) -> Json:
    """Return a job as a batch of OpenAI."""
    state, progress, spec = word_of(pb.JobState, job.state), job.progress, job.spec
    status = _STATUS.get(state, state)
    if job.closing:  # items without a result are still being counted, so there are no files yet
        status = "cancelling" if job.state == pb.JOB_STATE_CANCELLED else "finalizing"
    ended = job.end_time.seconds if job.HasField("end_time") else None
    has_files = status in _ENDS and not _is_expired(job)
    has_output = has_files or job.state == pb.JOB_STATE_PAUSED
    file_id = f"{FILE}{job.id}"
    return {
        "id": f"{BATCH}{job.id}",
        "object": "batch",
        "endpoint": spec.name if spec.name in _ENDPOINTS else URLS[0],
        "errors": _errors(job),
        "input_file_id": f"{FILE}{spec.input.upload_id}",
        "completion_window": _window(job),
        "status": status,
        "output_file_id": file_id + OUTPUT if has_output and progress.succeeded else None,
        "error_file_id": file_id + ERRORS if has_files and progress.dead else None,
        "created_at": job.create_time.seconds,
        "in_progress_at": job.start_time.seconds if job.HasField("start_time") else None,
        "expires_at": spec.limits.deadline_time.seconds or None,
        "finalizing_at": ended if status == "finalizing" else None,
        "cancelling_at": ended if status in ("cancelling", "cancelled") else None,
        **{f"{end}_at": ended if status == end else None for end in _ENDS},
        "request_counts": {
            "total": progress.total,
            "completed": progress.succeeded,
            "failed": progress.dead,
        },
        "metadata": dict(spec.labels),
    }


def _is_expired(job: pb.Job) -> bool:
    return 0 < ms_of(job.results_expire_time) <= unix_ms()


def _errors(job: pb.Job) -> Json | None:
    """Return why a job failed or was paused, in OpenAI's form."""
    if not job.reason or job.state not in (pb.JOB_STATE_FAILED, pb.JOB_STATE_PAUSED):
        return None
    error = {"code": job.reason_code.lower(), "message": job.reason, "param": None, "line": None}
    return {"object": "list", "data": [error]}


def _window(job: pb.Job) -> str:
    seconds = job.spec.limits.deadline_time.seconds - job.create_time.seconds
    return f"{round(seconds / 3600)}h" if seconds > 0 else "24h"
