"""Offline jobs, with asyncio. jobs_blocking.py is generated from this file: run scripts/gen_client after a change."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import chain
from time import monotonic
from typing import Any, TypeVar

import grpc

from sluice.client import channel
from sluice.client.channel import LISTING_S, LOOKUP_S
from sluice.client.retry import Retries, RetryPolicy
from sluice.errors import SluiceError
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.jobs_pb2_grpc import JobServiceStub

UPLOAD_S = 3600.0
"""Timeout of an upload, in seconds."""

_Q = TypeVar("_Q")
_R = TypeVar("_R")


class AsyncCaller:
    """Makes calls with one response, and retries those that can succeed later."""

    def __init__(self, metadata: tuple[tuple[str, str], ...], retry: RetryPolicy) -> None:
        self._metadata = metadata
        self._retry = retry

    async def _lookup(
        self,
        method: channel.AioMethod[_Q, _R],
        request: _Q,
        timeout_s: float = LOOKUP_S,
    ) -> _R:
        channel.check_timeout(timeout_s)
        retries = Retries(self._retry, timeout_s, monotonic())
        while True:
            left_s = retries.timeout_s(monotonic())
            try:
                return await method(request, timeout=left_s, metadata=self._metadata)
            except grpc.RpcError as failed:
                error = channel.error_of(failed)
            await sleep(retries.wait_s_after(error, monotonic()))


class AsyncJobs(AsyncCaller):
    """Offline jobs: the attribute `jobs` of a client. Messages are those of sluice/v1/jobs.proto.

    Calls are retried as the client's `RetryPolicy` says. `watch` and `results` continue when their stream breaks off,
    `dead_letters` does not. Every method may raise `SluiceError`.
    """

    def __init__(
        self,
        opened: channel.AioChannel,
        metadata: tuple[tuple[str, str], ...],
        retry: RetryPolicy,
    ) -> None:
        super().__init__(metadata, retry)
        self._stub = JobServiceStub(opened)

    async def _resumed(self, method: Any, request: Any) -> AsyncIterator[Any]:
        """Yield the responses of `method`; a stream that breaks off is opened again with `request`."""
        retries = Retries(self._retry, None, monotonic())
        while True:
            call = method(request, metadata=self._metadata)
            try:
                with channel.reading(call):
                    async for response in call:
                        retries.progressed()
                        yield response
                return
            except SluiceError as failed:
                error = failed
            await sleep(retries.wait_s_after(error, monotonic()))

    async def upload(self, name: str, read: Callable[[], Iterable[bytes]]) -> str:
        """Upload a file and return its upload_id.

        Args:
            name: Name of the file, whose extension sets the format.
            read: Opens the file and returns its content in pieces of at most 512 KiB; called again for each retry.
        """
        retries = Retries(self._retry, UPLOAD_S, monotonic())
        while True:
            pieces = (pb.UploadInputRequest(data=piece) for piece in read())
            left_s = retries.timeout_s(monotonic())
            try:
                stored = await self._stub.UploadInput(
                    chain((pb.UploadInputRequest(name=name),), pieces),
                    timeout=left_s,
                    metadata=self._metadata,
                )
                return stored.upload_id
            except grpc.RpcError as failed:
                error = channel.error_of(failed)
            await sleep(retries.wait_s_after(error, monotonic()))

    async def create(self, spec: pb.JobSpec, idempotency_key: str) -> pb.Job:
        """Create a job. A repeated key returns the existing job; with another `spec` it is an error."""
        request = pb.CreateJobRequest(spec=spec, idempotency_key=idempotency_key)
        return (await self._lookup(self._stub.CreateJob, request)).job

    async def get(self, job_id: str) -> pb.Job:
        """Return the current state of a job."""
        return (await self._lookup(self._stub.GetJob, pb.GetJobRequest(id=job_id))).job

    async def list(self, states: Sequence[pb.JobState.ValueType] = ()) -> AsyncIterator[pb.Job]:
        """Yield the tenant's jobs, newest first; if `states` are given, only jobs in one of them."""
        request = pb.ListJobsRequest(states=states)
        while True:
            page = await self._lookup(self._stub.ListJobs, request)
            for job in page.jobs:
                yield job
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def totals(self) -> dict[pb.JobState.ValueType, int]:
        """Return the number of the tenant's jobs by state, without states that have none."""
        page = await self._lookup(self._stub.ListJobs, pb.ListJobsRequest(page_size=1))
        return {total.state: total.jobs for total in page.totals}

    async def watch(self, job_id: str, *, until_paused: bool = False) -> AsyncIterator[pb.Job]:
        """Yield the job now and after each change, until it ends; with `until_paused` also until it is paused."""
        request = pb.WatchJobRequest(id=job_id, until_paused=until_paused)
        async for response in self._resumed(self._stub.WatchJob, request):
            yield response.job

    async def pause(self, job_id: str) -> pb.Job:
        """Pause a job until it is resumed."""
        return (await self._lookup(self._stub.PauseJob, pb.PauseJobRequest(id=job_id))).job

    async def resume(self, job_id: str, limits: pb.JobLimits | None = None) -> pb.Job:
        """Resume a paused job; `limits` replace its own."""
        request = pb.ResumeJobRequest(id=job_id, limits=limits)
        return (await self._lookup(self._stub.ResumeJob, request)).job

    async def cancel(self, job_id: str) -> pb.Job:
        """Cancel a job; it cannot be resumed, and its results so far stay readable."""
        return (await self._lookup(self._stub.CancelJob, pb.CancelJobRequest(id=job_id))).job

    async def delete(self, job_id: str) -> None:
        """Delete an ended job and its results."""
        await self._lookup(self._stub.DeleteJob, pb.DeleteJobRequest(id=job_id))

    async def retry(self, job_id: str, reasons: Sequence[str] = ()) -> int:
        """Retry the dead letters of an ended job, by default all, and return their number.

        `reasons` selects those with one of these reasons.
        """
        request = pb.RetryDeadLettersRequest(id=job_id, reasons=reasons)
        return (await self._lookup(self._stub.RetryDeadLetters, request)).items

    async def results(
        self,
        job_id: str,
        *,
        from_index: int = 0,
        follow: bool = False,
        stage: int | None = None,
    ) -> AsyncIterator[pb.JobResult]:
        """Yield the results in the order of the input, from `from_index` on; with `follow` wait for later results.

        `stage` counts from 0; None for the last one, or of a paused or ended job the one that it reached.
        """
        request = pb.GetResultsRequest(id=job_id, from_index=from_index, follow=follow, stage=stage)
        async for response in self._resumed(self._stub.GetResults, request):
            for result in response.results:
                yield result
                # Another call continues behind the last result that the caller has.
                request.from_index = result.index + 1

    async def dead_letters(self, job_id: str) -> AsyncIterator[pb.JobResult]:
        """Yield the items that failed finally, in the order of the input."""
        call = self._stub.ListDeadLetters(
            pb.ListDeadLettersRequest(id=job_id), timeout=LISTING_S, metadata=self._metadata
        )
        with channel.reading(call):
            async for response in call:
                for result in response.results:
                    yield result
