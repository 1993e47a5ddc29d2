"""A real gRPC server of JobService that keeps one job: for tests of its client and of `sluice batch`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from sluice.errors import ShuttingDown, UnknownModel
from sluice.v1 import inference_pb2, jobs_pb2_grpc
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import duration
from tests.support.scripted import Fail, _abort


def answered(index: int, text: str) -> pb.JobResult:
    """An answer."""
    answer = pb.JobAnswer(
        request_id=f"r{index}",
        model="small",
        text=text,
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        usage=inference_pb2.Usage(prompt_tokens=5, completion_tokens=3),
    )
    return pb.JobResult(
        index=index, line=index + 1, custom_id=f"i{index}", attempts=1, answer=answer
    )


def failed(index: int, reason: str = "PROMPT_TOO_LONG", attempts: int = 1) -> pb.JobResult:
    """A dead letter."""
    error = pb.JobItemError(code=3, reason=reason, message="is too long")
    return pb.JobResult(
        index=index, line=index + 1, custom_id=f"i{index}", attempts=attempts, error=error
    )


@dataclass
class ScriptedJobs(jobs_pb2_grpc.JobServiceServicer):
    """What was asked, and what it answers.

    Attributes:
        states: of the job, one for each change that WatchJob shows; the last one stays.
        breaks: streams that break after their first message before they work.
    """

    states: Sequence["pb.JobState.ValueType"] = (pb.JOB_STATE_RUNNING, pb.JOB_STATE_COMPLETED)
    found: Sequence[pb.JobResult] = ()
    reason: str = ""
    report: pb.JobReport | None = None
    breaks: int = 0
    address: str = ""
    uploads: dict[str, bytes] = field(default_factory=dict)
    created: list[pb.CreateJobRequest] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    @asynccontextmanager
    async def serve(self) -> "AsyncIterator[ScriptedJobs]":
        """Serves on a free port until the block ends."""
        server = grpc.aio.server()
        jobs_pb2_grpc.add_JobServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)

    def job(self, state: "pb.JobState.ValueType") -> pb.Job:
        """The job in a state."""
        dead = sum(result.HasField("error") for result in self.found)
        progress = pb.JobProgress(
            total=len(self.found),
            total_final=True,
            succeeded=len(self.found) - dead,
            dead=dead,
            items_per_second=2.5,
            tokens_per_second=70,
            remaining=duration(61_000),
            cost=0.25,
        )
        return pb.Job(
            id="job-1",
            state=state,
            reason=self.reason,
            reason_code="",
            progress=progress,
            report=self.report,
        )

    async def UploadInput(self, pieces: Any, context: Any) -> pb.UploadInputResponse:  # type: ignore[override]
        """Keeps the file."""
        name, data = "", b""
        async for piece in pieces:
            name, data = name or piece.name, data + piece.data
        self.uploads[name] = data
        return pb.UploadInputResponse(upload_id=f"upload-{name}", size_bytes=len(data))

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:  # type: ignore[override]
        """Refuses the model "huge"."""
        self.created.append(request)
        if request.spec.model == "huge":
            await _abort(context, Fail(UnknownModel("no model huge; there are small, large")))
        return pb.CreateJobResponse(job=self.job(pb.JOB_STATE_QUEUED))

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:  # type: ignore[override]
        """The job in its last state."""
        return pb.GetJobResponse(job=self.job(self.states[-1]))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:  # type: ignore[override]
        """Two pages of one job each."""
        self.asked.append(request)
        token = "" if request.page_token else "2"
        totals = [pb.JobStateTotal(state=self.states[-1], jobs=2)]
        jobs = [self.job(self.states[-1])]
        return pb.ListJobsResponse(jobs=jobs, next_page_token=token, totals=totals)

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> Any:  # type: ignore[override]
        """Every state."""
        for state in self.states:
            yield pb.WatchJobResponse(job=self.job(state))
            await self._break(context)

    async def PauseJob(self, request: pb.PauseJobRequest, context: Any) -> pb.PauseJobResponse:  # type: ignore[override]
        """It is paused."""
        return pb.PauseJobResponse(job=self.job(pb.JOB_STATE_PAUSED))

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:  # type: ignore[override]
        """It runs."""
        self.asked.append(request)
        return pb.ResumeJobResponse(job=self.job(pb.JOB_STATE_RUNNING))

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:  # type: ignore[override]
        """It has ended."""
        return pb.CancelJobResponse(job=self.job(pb.JOB_STATE_CANCELLED))

    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Any) -> pb.DeleteJobResponse:  # type: ignore[override]
        """It is gone."""
        self.asked.append(request)
        return pb.DeleteJobResponse()

    async def RetryDeadLetters(  # type: ignore[override]
        self, request: pb.RetryDeadLettersRequest, context: Any
    ) -> pb.RetryDeadLettersResponse:
        """All."""
        self.asked.append(request)
        return pb.RetryDeadLettersResponse(items=2)

    async def GetResults(self, request: pb.GetResultsRequest, context: Any) -> Any:  # type: ignore[override]
        """One a message."""
        self.asked.append(pb.GetResultsRequest.FromString(request.SerializeToString()))
        for result in self.found[request.from_index :]:
            yield pb.GetResultsResponse(results=[result])
            await self._break(context)

    async def ListDeadLetters(self, request: pb.ListDeadLettersRequest, context: Any) -> Any:  # type: ignore[override]
        """All in one message."""
        letters = [result for result in self.found if result.HasField("error")]
        yield pb.ListDeadLettersResponse(results=letters)

    async def _break(self, context: Any) -> None:
        if self.breaks:
            self.breaks -= 1
            await _abort(context, Fail(ShuttingDown("this process ends", retry_after_s=0.01)))
