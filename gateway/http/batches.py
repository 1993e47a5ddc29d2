"""/v1/files and /v1/batches, on top of `sluice.v1.JobService`."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from google.protobuf.message import Message

from gateway.api.job_forwarder import JobForwarder, errors_of_jobs
from gateway.http import batch_objects as objects
from gateway.http.answers import encode
from gateway.http.batch_objects import Json
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


class JobCalls:
    """Answers the calls, each method those of its URL."""

    def __init__(self, jobs: JobForwarder) -> None:
        self._jobs = jobs

    async def upload(self, call: HttpCall) -> Json:
        """Stores a file, as it arrives."""
        form = FileForm(call.metadata.get("content-type", ""))
        with errors_of_jobs():
            storing = self._begin(call, "UploadInput", wait_s=UPLOAD_S)
            try:
                await _send(call, form, storing)
                stored = await storing
            finally:
                storing.cancel()
        file_id, now = objects.FILE + stored.upload_id, int(time.time())
        return objects.file_object(file_id, form.name, stored.size_bytes, now)

    async def file(self, call: HttpCall) -> Json:
        """What is known of a file."""
        file_id = call.path_params["id"]
        if result := objects.result_file(file_id):
            return objects.result_object(await self._over(call, result[0]), file_id)
        request = pb.GetUploadRequest(upload_id=objects.upload_of(file_id))
        one = await self._ask(call, "GetUpload", request)
        return objects.file_object(file_id, one.name, one.size_bytes, one.create_time.seconds)

    async def files(self, call: HttpCall) -> Json:
        """A page of the tenant's files: uploads, and the results of batches that are over."""
        files = [
            objects.file_object(
                objects.FILE + one.upload_id, one.name, one.size_bytes, one.create_time.seconds
            )
            async for one in self._all(call, "uploads", pb.ListUploadsRequest())
        ]
        async for job in self._all(call, "jobs", pb.ListJobsRequest()):
            files += objects.result_files(job)
        return objects.file_page(files, call.query_params)

    async def delete(self, call: HttpCall) -> Json:
        """Deletes an upload."""
        file_id = call.path_params["id"]
        if result := objects.result_file(file_id):
            raise InvalidRequest.of(
                "id", f"results go with their job: `sluice batch delete {result[0]}`"
            )
        request = pb.DeleteUploadRequest(upload_id=objects.upload_of(file_id))
        await self._ask(call, "DeleteUpload", request)
        return {"id": file_id, "object": "file", "deleted": True}

    async def content(self, call: HttpCall) -> None:
        """The lines of a file of results, in the order of the input."""
        result = objects.result_file(call.path_params["id"])
        if result is None:
            raise UploadUnknown("only output and error files of batches can be read")
        job, part = result
        method, request = (
            ("GetResults", pb.GetResultsRequest(id=job))
            if part == objects.OUTPUT
            else ("ListDeadLetters", pb.ListDeadLettersRequest(id=job))
        )
        with errors_of_jobs(), call.while_connected():
            await self._over(call, job)
            pages = self._begin(call, method, request, wait_s=UPLOAD_S)
            try:
                async for page in pages:
                    await call.write(_lines(job, page.results, part), _LINES, more=True)
            finally:
                pages.cancel()
        await call.write(b"", _LINES)

    async def create(self, call: HttpCall) -> Json:
        """A new batch."""
        request = objects.create_request(await call.object(), call.metadata, unix_ms())
        return await self._batch(call, "CreateJob", request)

    async def batch(self, call: HttpCall) -> Json:
        """A batch as it is now."""
        job = objects.job_of(call.path_params["id"])
        return await self._batch(call, "GetJob", pb.GetJobRequest(id=job))

    async def cancel(self, call: HttpCall) -> Json:
        """Ends a batch."""
        job = objects.job_of(call.path_params["id"])
        return await self._batch(call, "CancelJob", pb.CancelJobRequest(id=job))

    async def batches(self, call: HttpCall) -> Json:
        """A page of the tenant's batches, newest first."""
        query = call.query_params
        if unknown := query.keys() - {"after", "limit"}:
            raise InvalidRequest.of(min(unknown), "is not served")
        limit = objects.page_limit(query.get("limit") or "20", objects.BATCHES_MAX)
        after = query.get("after") or None
        wanted, jobs = after and objects.job_of(after), list[pb.Job]()
        async for job in self._all(call, "jobs", pb.ListJobsRequest()):
            if wanted is None:
                jobs.append(job)
            elif job.id == wanted:
                wanted = None
            if len(jobs) > limit:
                break
        data = [objects.batch_object(job) for job in jobs[:limit]]
        return objects.list_object(data, has_more=len(jobs) > limit)

    async def _over(self, call: HttpCall, job: str) -> pb.Job:
        """A job that is over."""
        found: pb.Job = (await self._ask(call, "GetJob", pb.GetJobRequest(id=job))).job
        if not found.HasField("end_time"):
            raise UploadUnknown("the batch is not over: its files are there when it is")
        return found

    async def _batch(self, call: HttpCall, method: str, request: Message) -> Json:
        return objects.batch_object((await self._ask(call, method, request)).job)

    def _begin(self, call: HttpCall, method: str, *request: Message, wait_s: float) -> Any:
        return self._jobs.begin(call.caller, call.metadata, method, *request, wait_s=wait_s)

    async def _ask(self, call: HttpCall, method: str, request: Message) -> Any:
        """What JobService answers to the caller of ``call``."""
        with errors_of_jobs():
            return await self._begin(call, method, request, wait_s=JOBS_S)

    async def _all(self, call: HttpCall, kind: str, request: Any) -> AsyncIterator[Any]:
        """What all pages of a list have; ``kind``: jobs or uploads."""
        request.page_size = 1000
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
    if form.fields != {"purpose": objects.PURPOSE}:
        wrong = min(form.fields.keys() - {"purpose"}, default="purpose")
        raise InvalidRequest.of(wrong, 'only purpose is served, and it must be "batch"')
    await storing.done_writing()


def _lines(job: str, results: Any, part: str) -> bytes:
    wanted = [one for one in results if one.HasField("answer") or part == objects.ERRORS]
    return b"".join(encode(output_line(job, one)) + b"\n" for one in wanted)
