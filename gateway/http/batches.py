"""/v1/files and /v1/batches, on top of `sluice.v1.JobService`: files and batches are uploads and jobs.

A file is an upload (``file-upload-...``), or the results of a job that is over: its answers (``file-job-...-output``)
or its dead letters (``file-job-...-errors``), which are made when they are read.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gateway.admission.arrivals import Arrivals
from gateway.admission.tenant_threads import TenantSlots
from gateway.api.job_forwarder import JobForwarder, errors_of_jobs
from gateway.http.call import HttpCall
from gateway.http.multipart import FileForm
from gateway.http.names import BATCH_RULES, IDEMPOTENCY_KEY, FieldNames
from gateway.http.requests import PRIORITY, class_of, labels_of
from sluice.client.openai_lines import encoded_line
from sluice.errors import InvalidRequest, JobUnknown, SluiceError, UploadUnknown
from sluice.openai.embeddings import EMBEDDINGS
from sluice.openai.requests import URLS, labels_of_metadata
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.inference_pb2 import Priority
from sluice.wire.clock import ms_of, timestamp, unix_ms
from sluice.wire.enums import value_of, word_of
from sluice.wire.job_calls import page_key

Json = dict[str, Any]

JOBS_S: Final = 30.0
"""Longest wait for a process of `jobs`, seconds."""
UPLOAD_S: Final = 3600.0
PIECE_BYTES: Final = 512 * 1024
"""The largest piece of an upload that JobService takes."""
_LINES: Final = {"content-type": "application/jsonl"}
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
LIST_PAGE: Final = 100
"""Jobs or uploads that a list reads at a time: 100 jobs with full labels have 1 MB."""
LISTS_MAX: Final = 8
"""Lists that are read at the same time; each keeps its entries in memory."""
LISTS_OWN: Final = 2
"""Those of one tenant."""
OVER: Final = (
    pb.JOB_STATE_COMPLETED, pb.JOB_STATE_FAILED, pb.JOB_STATE_CANCELLED, pb.JOB_STATE_EXPIRED
)  # fmt: skip
"""States of jobs that have files of results."""
EXPIRY_S_MIN: Final = 3600
EXPIRY_S_MAX: Final = 30 * 24 * 3600
"""Bounds of how long files are kept, seconds: those of OpenAI."""
_ENDPOINTS: Final = (*URLS, EMBEDDINGS)
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,3})h")
_STATUS: Final = {
    "queued": "validating",
    "running": "in_progress",
    "paused": "in_progress",  # OpenAI has no word for it; `errors` says what to do
}
"""OpenAI's words where they are others."""
_ENDS: Final = ("completed", "failed", "cancelled", "expired")


class JobCalls:
    """Answers the calls, each method those of its URL."""

    def __init__(self, jobs: JobForwarder, arrivals: Arrivals) -> None:
        self._jobs = jobs
        self._arrivals = arrivals
        self._lists = TenantSlots(LISTS_MAX, own=LISTS_OWN)

    async def upload(self, call: HttpCall) -> Json:
        """Store a file, as it arrives."""
        form = FileForm(call.metadata.get("content-type", ""))
        with self._arrivals.uploads.held(call.caller.tenant), errors_of_jobs():
            storing = self._jobs.begin(call, "UploadInput", wait_s=UPLOAD_S)
            try:
                await _send(call, form, storing)
                stored = await storing
            finally:
                storing.cancel()
        file_id, now = FILE + stored.upload_id, int(time.time())
        return file_object(
            file_id, form.name, stored.size_bytes, now, expires=stored.expire_time.seconds
        )

    async def file(self, call: HttpCall) -> Json:
        """What is known of a file."""
        file_id = call.path_params["id"]
        if result := result_file(file_id):
            return result_object(await self._over(call, *result), file_id)
        request = pb.GetUploadRequest(upload_id=upload_of(file_id))
        return _upload_object(request.upload_id, await self._ask(call, "GetUpload", request))

    async def files(self, call: HttpCall) -> Json:
        """Return a page of the tenant's files: uploads, and the results of batches that are over."""
        purpose, files = call.query_params.get("purpose"), list[Json]()
        async with self._lists.held(call.caller.tenant):
            if purpose in (None, "", PURPOSE):
                async for upload in self._all(call, "uploads", pb.ListUploadsRequest()):
                    files.append(_upload_object(upload.upload_id, upload))
            if purpose in (None, "", RESULTS):
                async for job in self._all(call, "jobs", pb.ListJobsRequest(states=OVER)):
                    batch = batch_object(job)
                    named = batch["output_file_id"], batch["error_file_id"]
                    files += [result_object(job, one) for one in named if one is not None]
            return file_page(files, call.query_params)

    async def delete(self, call: HttpCall) -> Json:
        """Deletes an upload."""
        file_id = call.path_params["id"]
        if result := result_file(file_id):
            raise InvalidRequest.of(
                "id", f"results go with their job: `sluice batch delete {result[0]}`"
            )
        request = pb.DeleteUploadRequest(upload_id=upload_of(file_id))
        await self._ask(call, "DeleteUpload", request)
        return {"id": file_id, "object": "file", "deleted": True}

    async def content(self, call: HttpCall) -> None:
        """The lines of a file of results, in the order of the input."""
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
            await self._over(call, job, part)
            pages = self._jobs.begin(call, method, request, wait_s=UPLOAD_S)
            try:
                async for page in pages:
                    await call.write(_lines(job, page.results, part), _LINES, more=True)
            finally:
                pages.cancel()
        await call.write(b"", _LINES)

    async def create(self, call: HttpCall) -> Json:
        """A new batch."""
        body = await call.object()
        call.named = FieldNames(BATCH_RULES, body)
        request = create_request(body, call.metadata, unix_ms())
        return await self._batch(call, "CreateJob", request)

    async def batch(self, call: HttpCall) -> Json:
        """A batch as it is now."""
        job = job_of(call.path_params["id"])
        return await self._batch(call, "GetJob", pb.GetJobRequest(id=job))

    async def cancel(self, call: HttpCall) -> Json:
        """Ends a batch."""
        job = job_of(call.path_params["id"])
        return await self._batch(call, "CancelJob", pb.CancelJobRequest(id=job))

    async def batches(self, call: HttpCall) -> Json:
        """Return a page of the tenant's batches, newest first."""
        query = {"limit": "20", **call.query_params}
        check_query(query)
        limit = page_limit(query["limit"] or str(BATCHES_MAX), BATCHES_MAX)
        request, jobs = pb.ListJobsRequest(), list[Json]()
        async with self._lists.held(call.caller.tenant):
            if after := query.get("after"):
                request.page_token = await self._token_after(call, after)
            while len(jobs) < limit:
                request.page_size = limit - len(jobs)
                listed: pb.ListJobsResponse = await self._ask(call, "ListJobs", request)
                jobs += map(batch_object, listed.jobs)
                request.page_token = listed.next_page_token
                if not listed.next_page_token:
                    break
            return list_object(jobs, has_more=bool(request.page_token))

    async def _token_after(self, call: HttpCall, batch: str) -> str:
        """Return the token of the page that begins behind ``batch``.

        Raises:
            JobUnknown: there is no such batch.
        """
        try:
            request = pb.GetJobRequest(id=job_of(batch))
            job: pb.Job = (await self._ask(call, "GetJob", request)).job
        except JobUnknown:
            raise _after_unknown(batch) from None
        return page_key(job.create_time.ToMilliseconds(), job.id)

    async def _over(self, call: HttpCall, job: str, part: str) -> pb.Job:
        """Return a job that has this file: it is over, or paused with answers.

        Raises:
            UploadUnknown: it has not.
        """
        found: pb.Job = (await self._ask(call, "GetJob", pb.GetJobRequest(id=job))).job
        if not (found.HasField("end_time") and not found.closing) and not (
            found.state == pb.JOB_STATE_PAUSED and part == OUTPUT
        ):
            raise UploadUnknown("the batch is not over: its files are there when it is")
        if _is_expired(found):
            raise UploadUnknown("the files of the batch have expired")
        return found

    async def _batch(self, call: HttpCall, method: str, request: Message) -> Json:
        return batch_object((await self._ask(call, method, request)).job)

    async def _ask(self, call: HttpCall, method: str, request: Message) -> Any:
        """What JobService answers to the caller of ``call``."""
        with errors_of_jobs():
            return await self._jobs.begin(call, method, request, wait_s=JOBS_S)

    async def _all(self, call: HttpCall, kind: str, request: Any) -> AsyncIterator[Any]:
        """Yield what all pages of a list have; ``kind``: jobs or uploads."""
        request.page_size = LIST_PAGE
        while True:
            page = await self._ask(call, f"List{kind.title()}", request)
            for entry in getattr(page, kind):
                yield entry
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


async def _send(call: HttpCall, form: FileForm, storing: Any) -> None:
    async for data in call.pieces():
        piece = form.feed(data)
        with suppress(asyncio.InvalidStateError):  # it has ended with an error already
            for start in range(0, len(piece), PIECE_BYTES):
                part = piece[start : start + PIECE_BYTES]
                await storing.write(pb.UploadInputRequest(name=form.name, data=part))
        if storing.done():
            return
    form.end()
    fields = dict(form.fields)
    expiry = {name: fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds")}
    if fields != {"purpose": PURPOSE}:
        wrong = min(fields.keys() - {"purpose"}, default="purpose")
        raise InvalidRequest.of(wrong, 'only purpose is served, and it must be "batch"')
    if any(expiry.values()):
        seconds = expiry["seconds"] or ""
        given = {**expiry, "seconds": int(seconds) if re.fullmatch("[0-9]{1,9}", seconds) else None}
        after = _expiry("expires_after", given)
        with suppress(asyncio.InvalidStateError):
            await storing.write(pb.UploadInputRequest(expires_after=after))
    await storing.done_writing()


def _expiry(field: str, given: Any) -> Duration:
    """Return how long a file is kept.

    Raises:
        InvalidRequest: ``given`` is not as OpenAI's API says.
    """
    if not isinstance(given, dict) or given.keys() != {"anchor", "seconds"}:
        raise InvalidRequest.of(field, "must be an object of anchor and seconds")
    if given["anchor"] != "created_at":
        raise InvalidRequest.of(f"{field}.anchor", 'must be "created_at"')
    seconds = given["seconds"]
    whole = isinstance(seconds, int) and not isinstance(seconds, bool)
    if not (whole and EXPIRY_S_MIN <= seconds <= EXPIRY_S_MAX):
        raise InvalidRequest.of(f"{field}.seconds", f"must be {EXPIRY_S_MIN} to {EXPIRY_S_MAX}")
    return Duration(seconds=seconds)


def _lines(job: str, results: Any, part: str) -> bytes:
    wanted = [one for one in results if one.HasField("answer") or part == ERRORS]
    return b"".join(encoded_line(job, one) for one in wanted)


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
    file_id: str,
    name: str,
    size_bytes: int,
    created: int,
    purpose: str = PURPOSE,
    expires: int = 0,
) -> Json:
    """Return a file; ``created``, ``expires``: in seconds since 1970, 0 where it does not expire."""
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
    labels = labels_of_metadata(given.pop("metadata", {}))
    expiry = given.pop("output_expires_after", None)
    if given:
        raise InvalidRequest.of(min(given), "is not served")
    # The name keeps the endpoint for `batch_object`; each line of the file names its own.
    spec = pb.JobSpec(name=endpoint, labels={**labels, **labels_of(headers)})
    if PRIORITY in headers:
        spec.priority = value_of(Priority, class_of(headers))
    spec.input.upload_id = upload_of(file_id)
    if expiry is not None:
        spec.results_expire_after.CopyFrom(_expiry("output_expires_after", expiry))
    spec.input.format = pb.JOB_INPUT_FORMAT_OPENAI
    end = now_unix_ms + int(window[1]) * 3_600_000
    spec.limits.deadline_time.CopyFrom(timestamp(end))
    # Nobody resumes a batch of OpenAI's API: lines that are no items go into its error file, however many there are.
    spec.limits.max_bad_line_share = 1.0
    key = headers.get(IDEMPOTENCY_KEY, "")
    return pb.CreateJobRequest(spec=spec, idempotency_key=key)


def page(data: list[Json], query: Mapping[str, str], most: int, *others: str) -> Json:
    """The page of a list that ``query`` asks for, of at most ``most`` entries; ``others``: what it may have beside.

    Raises:
        InvalidRequest: a parameter is not served, or its value does not fit.
        UploadUnknown, JobUnknown: the list has no entry ``after``.
    """
    check_query(query, *others)
    limit = page_limit(query.get("limit") or str(most), most)
    if after := query.get("after"):
        place = next((at for at, one in enumerate(data, 1) if one["id"] == after), None)
        if place is None:
            raise _after_unknown(after)
        data = data[place:]
    return list_object(data[:limit], has_more=len(data) > limit)


def check_query(query: Mapping[str, str], *others: str) -> None:
    """Raise InvalidRequest for a parameter of a list that is not served; ``others``: what it may have beside."""
    if unknown := query.keys() - {"limit", "after", *others}:
        raise InvalidRequest.of(min(unknown), "is not served")


def list_object(shown: list[Json], *, has_more: bool) -> Json:
    """Return a page of a list as an object of OpenAI's API."""
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return {"object": "list", "data": shown, "has_more": has_more, **ends}


def _after_unknown(after: str) -> SluiceError:
    unknown, kind = (JobUnknown, "batch") if after.startswith(BATCH) else (UploadUnknown, "file")
    return unknown(f"after: there is no {kind} {after!r} in this list")


def page_limit(text: str, most: int) -> int:
    """How many entries a page has.

    Raises:
        InvalidRequest: ``text`` says none, or more than ``most``.
    """
    if not (re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= most):
        raise InvalidRequest.of("limit", f"must be 1 to {most}")
    return int(text)


def file_page(files: list[Json], query: Mapping[str, str]) -> Json:
    """The page of ``files`` that ``query`` asks for; raises as `page`."""
    if (order := query.get("order") or "desc") not in ("asc", "desc"):
        raise InvalidRequest.of("order", "must be asc or desc")
    wanted = query.get("purpose")
    kept = [one for one in files if not wanted or wanted == one["purpose"]]
    kept.sort(
        key=lambda one: (one["created_at"], one["purpose"], one["id"]), reverse=order == "desc"
    )
    return page(kept, query, FILES_MAX, "purpose", "order")


def _upload_object(upload_id: str, one: Any) -> Json:
    created, expires = one.create_time.seconds, one.expire_time.seconds
    return file_object(FILE + upload_id, one.name, one.size_bytes, created, expires=expires)


def result_object(job: pb.Job, file_id: str) -> Json:
    """Return a file of results. Its bytes were counted when the outcomes were written."""
    progress = job.progress
    size = progress.output_bytes if file_id.endswith(OUTPUT) else progress.error_bytes
    made = job.end_time.seconds or job.state_time.seconds
    expires = job.results_expire_time.seconds
    return file_object(file_id, f"{file_id}.jsonl", size, made, RESULTS, expires)


def batch_object(job: pb.Job) -> Json:
    """A job as a batch."""
    word, progress, spec = word_of(pb.JobState, job.state), job.progress, job.spec
    status = _STATUS.get(word, word)
    if job.closing:  # its files are there when the items without an outcome are counted
        status = "cancelling" if job.state == pb.JOB_STATE_CANCELLED else "finalizing"
    ended = job.end_time.seconds if job.HasField("end_time") else None
    over = status in _ENDS
    over = over and not _is_expired(job)
    readable = over or job.state == pb.JOB_STATE_PAUSED
    file_id = f"{FILE}{job.id}"
    return {
        "id": f"{BATCH}{job.id}",
        "object": "batch",
        "endpoint": spec.name if spec.name in _ENDPOINTS else URLS[0],
        "errors": _errors(job),
        "input_file_id": f"{FILE}{spec.input.upload_id}",
        "completion_window": _window(job),
        "status": status,
        "output_file_id": file_id + OUTPUT if readable and progress.succeeded else None,
        "error_file_id": file_id + ERRORS if over and progress.dead else None,
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
