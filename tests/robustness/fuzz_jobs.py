"""JobService without sockets for fuzzing: its store is a JetStream in memory, in which jobs are in any state."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from nats.js.api import Header
from nats.js.errors import APIError, NotFoundError
from opentelemetry.trace import NoOpTracer

from jobs.app import guarded
from jobs.process import JobProcess
from jobs.service import JobService
from jobs.store import JobStore
from sluice.defaults import ALL_TENANTS_METADATA, TENANT_METADATA
from sluice.internal.v1.job_pb2 import JobRecord, JobSegment
from sluice.settings import JobsSettings
from sluice.telemetry.instruments import Instruments
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.codec import request_reader
from tests.robustness.fuzz_gateway import Context
from tests.robustness.mutator import Mutator

CALL_S: Final = 0.02
"""Then its caller goes away: WatchJob and GetResults wait for what nobody does here, seconds."""
JOBS_MAX: Final = 30
TENANT: Final = "acme"
_WRONG_SEQUENCE: Final = 10071
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["JobService"]
_STATES: Final = tuple(pb.JobState.values())
_SETTINGS: Final[dict[str, Any]] = {
    "input_prefixes": ["file:///srv/", "https://example.org/in/"],
    "input_streams": {"ORDERS": ["orders.>"]},
}


class MemoryJetStream:
    """JetStream as `JobStore` uses it, with its messages in memory; it is its client as well."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[str, bytes]] = {}
        self._numbers = count(1)

    def jetstream(self, **_: Any) -> "MemoryJetStream":
        """Return itself."""
        return self

    async def add_stream(self, _: Any) -> None:
        """Accept every stream."""

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None, **_: Any
    ) -> Any:
        """Store a message, unless it names another last message of its subject."""
        expected = (headers or {}).get(Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value)
        if expected is not None and int(expected) != max(self._of(subject), default=0):
            raise APIError(code=400, err_code=_WRONG_SEQUENCE, description="wrong last sequence")
        sequence = next(self._numbers)
        self._messages[sequence] = (subject, payload)
        return SimpleNamespace(seq=sequence)

    async def get_msg(self, stream: str, seq: int | None, subject: str, **_: Any) -> Any:
        """Return the first message of `subject` from `seq` on; the last one if that is None."""
        found = [at for at in self._of(subject) if at >= (seq or 0)]
        if not found:
            raise NotFoundError
        sequence = found[-1 if seq is None else 0]
        return SimpleNamespace(seq=sequence, data=self._messages[sequence][1])

    async def get_last_msg(self, stream: str, subject: str) -> Any:
        """Return the last message of `subject`."""
        return await self.get_msg(stream, None, subject)

    async def delete_msg(self, _: str, seq: int) -> None:
        """Remove a message."""
        self._messages.pop(seq, None)

    async def purge_stream(self, _: str, subject: str) -> bool:
        """Remove the messages of a subject, which may end with a wildcard."""
        for sequence in self._of(subject):
            del self._messages[sequence]
        return True

    async def pull_subscribe(self, subject: str, **_: Any) -> "MemoryReader":
        """Read the last message of each subject."""
        return MemoryReader(list(dict(self._messages[at] for at in self._of(subject)).items()))

    def _of(self, subject: str) -> list[int]:
        prefix = subject.removesuffix(">")
        return [
            sequence
            for sequence, (name, _) in self._messages.items()
            if name == subject or (prefix != subject and name.startswith(prefix))
        ]


class MemoryReader:
    """A pull subscription of `MemoryJetStream`."""

    def __init__(self, messages: list[tuple[str, bytes]]) -> None:
        self._messages = messages

    async def consumer_info(self) -> Any:
        """Return how many messages are left."""
        return SimpleNamespace(num_pending=len(self._messages))

    async def fetch(self, batch: int, **_: Any) -> list[Any]:
        """Return the next messages."""
        taken, self._messages = self._messages[:batch], self._messages[batch:]
        left = await self.consumer_info()
        return [SimpleNamespace(subject=name, data=data, metadata=left) for name, data in taken]

    async def unsubscribe(self) -> None:
        """End the subscription."""


class FuzzedJobs:
    """The service, and a hand that changes its jobs as their runner would."""

    def __init__(self) -> None:
        settings = JobsSettings.model_validate(_SETTINGS)
        self._store = JobStore(settings, replicas=1)
        gateways: Any = _Gateways()
        process = JobProcess("jobs", settings, self._store, gateways, NoOpTracer(), Instruments())
        process.quotas.counted.set()
        self._service = JobService(process)
        self._jobs: list[str] = []
        self._uploads: list[str] = []

    async def start(self) -> None:
        """Open the store."""
        client: Any = MemoryJetStream()
        await self._store.start(client)

    async def call(self, draw: Mutator) -> str:
        """A call of any method, after one of the jobs may have gone on."""
        draw = Mutator(draw.random, (*self._jobs[-8:], "orders.1", *_SETTINGS["input_prefixes"]))
        if self._jobs and draw.chance(0.3):
            await self._run(draw)
        method = draw.random.choice(_SERVICE.methods)
        kind: type[Message] = getattr(pb, method.input_type.name)
        read = request_reader(kind.FromString)
        requests = [
            read(draw.packed(self._request(draw, kind)))
            for _ in range(draw.random.randint(0, 3) if method.client_streaming else 1)
        ]
        context = Context(_metadata(draw))
        behaviour = getattr(self._service, method.name)
        given = _each(requests) if method.client_streaming else requests[0]
        try:
            async with asyncio.timeout(CALL_S):
                response = await guarded(behaviour, given, context)
        except (grpc.aio.AbortError, TimeoutError) as ended:
            return context.outcome if isinstance(ended, grpc.aio.AbortError) else "left"
        self._remember(response)
        return "OK"

    def _request(self, draw: Mutator, kind: type[Message]) -> Message:
        """One that is likely to name what there is."""
        request = draw.filled(kind, draw.random.choice((0.1, 0.3, 0.6)))
        if isinstance(request, pb.CreateJobRequest) and draw.chance(0.7):
            request.spec.Clear()
            request.spec.model = "small"
            request.spec.input.upload_id = draw.random.choice(self._uploads or [""])
        elif hasattr(request, "id") and self._jobs and draw.chance(0.8):
            request.id = draw.random.choice(self._jobs)
        elif isinstance(request, pb.UploadInputRequest):
            request.data = draw.bytes(b'{"id": "a", "prompt": "hi"}\n')
        return request

    def _remember(self, response: Any) -> None:
        """What later calls may name."""
        if isinstance(response, pb.CreateJobResponse):
            self._jobs.append(response.job.id)
        elif isinstance(response, pb.UploadInputResponse):
            self._uploads.append(response.upload_id)
        del self._jobs[:-JOBS_MAX], self._uploads[:-JOBS_MAX]

    async def _run(self, draw: Mutator) -> None:
        """A job gets another state, and a segment of results."""

        def edit(record: JobRecord) -> None:
            record.job.state = draw.random.choice(_STATES)
            record.stage = draw.random.randint(0, 2)

        jobs = [record.job.id async for record in self._store.records()]
        if not jobs:
            return
        job = draw.random.choice(jobs)
        record = await self._store.change(job, edit)
        last = (await self._store.last_segment(job, record.stage, record.attempt))[1]
        segment = draw.filled(JobSegment, 0.5)
        for position, outcome in enumerate(segment.outcomes):
            outcome.position = position if draw.chance(0.8) else outcome.position
        await self._store.append(job, record.stage, record.attempt, segment, last)


class _Gateways:
    """Knows the models of the fuzzed jobs."""

    async def model_names(self) -> set[str]:
        """The models that exist."""
        return {"auto", "small", "large"}


async def _each(requests: Sequence[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def _metadata(draw: Mutator) -> list[tuple[str, str]]:
    tenant = draw.text() if draw.chance(0.1) else TENANT
    every = [(ALL_TENANTS_METADATA, "1")] if draw.chance(0.1) else []
    return [(TENANT_METADATA, tenant), *every]
