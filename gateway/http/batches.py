"""/v1/files and /v1/batches, on top of `sluice.v1.JobService`."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import grpc

from gateway.api.job_forwarder import JobForwarder, error_of_jobs
from gateway.http import batch_objects as objects
from gateway.http.answers import encode
from gateway.http.call import HttpCall
from gateway.http.multipart import FileForm
from sluice.client.openai_lines import output_line
from sluice.errors import InvalidRequest, UploadUnknown
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import unix_ms

JOBS_S: Final = 30.0
"""Longest wait for a process of `jobs`, seconds."""
UPLOAD_S: Final = 3600.0
PIECE_BYTES: Final = 512 * 1024
"""The largest piece of an upload that JobService takes."""
_LINES: Final = {"content-type": "application/jsonl"}


class Files:
    """/v1/files."""

    def __init__(self, jobs: JobForwarder) -> None:
        self._jobs = jobs

    async def upload(self, call: HttpCall) -> None:
        """Stores a file, as it arrives."""
        form = FileForm(call.metadata.get("content-type", ""))
        metadata = self._jobs.metadata(call.caller, call.metadata)
        with _errors_of_jobs():
            storing: Any = self._jobs.stub().UploadInput(metadata=metadata, timeout=UPLOAD_S)
            try:
                await _send(call, form, storing)
                stored = await storing
            finally:
                storing.cancel()
        file_id = f"{objects.FILE}{stored.upload_id}"
        described = objects.file_object(
            file_id, form.name, stored.size_bytes, int(time.time()), objects.PURPOSE
        )
        await call.write(encode(described))

    async def get(self, call: HttpCall) -> None:
        """What is known of a file."""
        file_id = call.path_params["id"]
        result = objects.result_file(file_id)
        if result is None:
            of_upload = pb.GetUploadRequest(upload_id=objects.upload_of(file_id))
            found = await _ask(self._jobs, call, "GetUpload", of_upload)
            created, size = found.create_time.seconds, found.size_bytes
            described = objects.file_object(file_id, found.name, size, created, objects.PURPOSE)
        else:
            described = objects.result_object(await self._job(call, result[0]), file_id)
        await call.write(encode(described))

    async def page(self, call: HttpCall) -> None:
        """A page of the tenant's files: uploads, and the results of batches that are over."""
        files = [
            objects.file_object(
                *(f"{objects.FILE}{one.upload_id}", one.name, one.size_bytes),
                *(one.create_time.seconds, objects.PURPOSE),
            )
            async for one in _all(self._jobs, call, "uploads", pb.ListUploadsRequest())
        ]
        async for job in _all(self._jobs, call, "jobs", pb.ListJobsRequest()):
            files += objects.result_files(job)
        await call.write(encode(objects.file_page(files, call.query_params)))

    async def delete(self, call: HttpCall) -> None:
        """Deletes an upload."""
        file_id = call.path_params["id"]
        if result := objects.result_file(file_id):
            raise InvalidRequest.of(
                "id", f"results go with their job: `sluice batch delete {result[0]}`"
            )
        request = pb.DeleteUploadRequest(upload_id=objects.upload_of(file_id))
        await _ask(self._jobs, call, "DeleteUpload", request)
        await call.write(encode({"id": file_id, "object": "file", "deleted": True}))

    async def content(self, call: HttpCall) -> None:
        """The lines of a file of results, in the order of the input."""
        file_id = call.path_params["id"]
        result = objects.result_file(file_id)
        if result is None:
            raise UploadUnknown("only output and error files of batches can be read")
        job, part = result
        of_call: Any = {
            "metadata": self._jobs.metadata(call.caller, call.metadata),
            "timeout": UPLOAD_S,
        }
        with _errors_of_jobs(), call.while_connected():
            await self._job(call, job)
            stub = self._jobs.stub()
            pages: Any = (
                stub.GetResults(pb.GetResultsRequest(id=job), **of_call)
                if part == objects.OUTPUT
                else stub.ListDeadLetters(pb.ListDeadLettersRequest(id=job), **of_call)
            )
            try:
                async for page in pages:
                    await call.write(_lines(job, page.results, part), _LINES, more=True)
            finally:
                pages.cancel()
        await call.write(b"", _LINES)

    async def _job(self, call: HttpCall, job: str) -> pb.Job:
        """A job that is over."""
        found = await _ask(self._jobs, call, "GetJob", pb.GetJobRequest(id=job))
        over: pb.Job = found.job
        if not over.HasField("end_time"):
            raise UploadUnknown("the batch is not over: its files are there when it is")
        return over


class Batches:
    """/v1/batches."""

    def __init__(self, jobs: JobForwarder) -> None:
        self._jobs = jobs

    async def create(self, call: HttpCall) -> None:
        """A new job."""
        request = objects.create_request(await call.object(), call.metadata, unix_ms())
        await self._answer(call, "CreateJob", request)

    async def get(self, call: HttpCall) -> None:
        """A job as it is now."""
        await self._answer(
            call, "GetJob", pb.GetJobRequest(id=objects.job_of(call.path_params["id"]))
        )

    async def cancel(self, call: HttpCall) -> None:
        """Ends a job."""
        job = objects.job_of(call.path_params["id"])
        await self._answer(call, "CancelJob", pb.CancelJobRequest(id=job))

    async def page(self, call: HttpCall) -> None:
        """A page of the tenant's jobs, newest first."""
        if unknown := call.query_params.keys() - {"after", "limit"}:
            raise InvalidRequest.of(min(unknown), "is not served")
        limit = objects.page_limit(call.query_params.get("limit") or "20", objects.BATCHES_MAX)
        after = call.query_params.get("after") or None
        jobs, has_more = await self._jobs_behind(call, after and objects.job_of(after), limit)
        data = [objects.batch_object(job) for job in jobs]
        await call.write(encode(objects.list_object(data, has_more=has_more)))

    async def _jobs_behind(
        self, call: HttpCall, after: str | None, limit: int
    ) -> tuple[list[pb.Job], bool]:
        """At most ``limit`` jobs behind the job ``after``, and whether there are more."""
        jobs: list[pb.Job] = []
        async for job in _all(self._jobs, call, "jobs", pb.ListJobsRequest()):
            if after is None and len(jobs) == limit:
                return jobs, True
            if after is None:
                jobs.append(job)
            elif job.id == after:
                after = None
        return jobs, False

    async def _answer(self, call: HttpCall, method: str, request: Any) -> None:
        response = await _ask(self._jobs, call, method, request)
        await call.write(encode(objects.batch_object(response.job)))


async def _ask(jobs: JobForwarder, call: HttpCall, method: str, request: Any) -> Any:
    """What JobService answers to the caller of ``call``."""
    metadata = jobs.metadata(call.caller, call.metadata)
    with _errors_of_jobs():
        return await getattr(jobs.stub(), method)(request, metadata=metadata, timeout=JOBS_S)


async def _all(jobs: JobForwarder, call: HttpCall, kind: str, request: Any) -> AsyncIterator[Any]:
    """What all pages of a list have; ``kind``: jobs or uploads."""
    request.page_size = 1000
    while True:
        page = await _ask(jobs, call, f"List{kind.title()}", request)
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
    if form.fields != {"purpose": objects.PURPOSE}:
        wrong = min(form.fields.keys() - {"purpose"}, default="purpose")
        raise InvalidRequest.of(wrong, 'only purpose is served, and it must be "batch"')
    await storing.done_writing()


def _lines(job: str, results: Any, part: str) -> bytes:
    wanted = [one for one in results if one.HasField("answer") or part == objects.ERRORS]
    return b"".join(encode(output_line(job, one)) + b"\n" for one in wanted)


@contextmanager
def _errors_of_jobs() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of_jobs(error) from None
