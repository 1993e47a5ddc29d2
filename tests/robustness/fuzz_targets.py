"""What is fuzzed beside the gateway: a batcher and a worker without sockets, credentials, uploads, what is stored."""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import Mock

from opentelemetry.trace import NoOpTracer

from batcher.app import Batcher
from batcher.core.workers import ChannelBroken
from batcher.workers.client import WorkerRefused, step_report
from gateway.http.batches import create_request, page_limit
from gateway.http.multipart import FileForm
from gateway.http.requests import parse_json
from gateway.identity.authenticator import Authenticator
from gateway.identity.credentials import KeyMissing, caller_of_key, caller_of_token, key_set
from gateway.streaming.idempotency import Replay, is_whole
from jobs.stages import check_stages
from model_workers.engine.cacheless import EchoEngine
from model_workers.worker import InboxFull, Worker
from sluice.errors import SluiceError
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.internal.v1.control_pb2 import ControlMessage
from sluice.internal.v1.gateway_pb2 import KeyRecord
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.internal.v1.task_pb2 import Task
from sluice.openai.fields import BadField
from sluice.settings import IdentitySettings, parse
from sluice.telemetry.instruments import Instruments
from sluice.v1 import jobs_pb2
from sluice.wire import subjects
from sluice.wire.api_keys import new_key
from sluice.wire.codec import MalformedMessage, unpack
from tests.robustness import fuzz_gateway, fuzz_inputs
from tests.robustness.fuzz_jobs import FuzzedJobs
from tests.robustness.fuzz_nats import MemoryNats
from tests.robustness.mutator import Mutator

Fuzzed = Callable[[Mutator], Awaitable[str]]
"""Draws one input and gives it to what is fuzzed; returns what became of it, and raises what must not happen."""

BATCHER: Final = "b1"
URL: Final = "127.0.0.1:1"


class FuzzedBatcher:
    """A batcher with one model and one worker, neither of which is ever reached."""

    def __init__(self) -> None:
        settings = parse({"triton": {"url": URL}, "nats": {"url": "nats://127.0.0.1:1"}}, "fuzz")
        self.nats: Any = MemoryNats()
        self._batcher = Batcher(self.nats, settings, BATCHER, NoOpTracer(), Instruments())
        self._loop = self._batcher.loops["small"]
        self._worker = f"{URL}/small"
        self._sequence = 0
        self._sent: list[worker_pb2.Batch] = []
        worker: Any = SimpleNamespace(
            send=lambda batch, _: self._sent.append(batch),
            cancel=list,
            announce_demand=lambda *_: None,
        )
        self._loop.workers = {self._worker: worker}

    async def start(self) -> None:
        """Subscribes to everything."""
        await self._batcher.listen()

    async def message(self, draw: Mutator) -> str:
        """A message of a gateway or the worker, and all that follows from it."""
        live = tuple(self._loop.table.requests)
        draw = Mutator(draw.random, (*live[-8:], "gw1", "small"))
        kind = draw.random.choice((self._task, self._control, self._step))
        outcome = await kind(draw)
        await self._loop.advance()
        for batch in self._sent:
            batch.SerializeToString()
        self._sent = self._sent[-4:]
        await asyncio.sleep(0)
        await self._loop.advance()
        return outcome

    async def _task(self, draw: Mutator) -> str:
        task = draw.filled(Task, 0.4)
        if draw.chance(0.8):
            task.gateway, task.model, task.priority_class = "gw1", "small", "standard"
            task.prompt_token_ids.append(7)
            task.request_id = task.request_id or "req-1"
            task.sampling.max_tokens = task.sampling.max_tokens or 5
        subject = subjects.task_to(BATCHER)
        await self.nats.feed(
            subjects.all_to(BATCHER), draw.packed(task), subject, **draw.envelope()
        )
        return "task"

    async def _control(self, draw: Mutator) -> str:
        payload = draw.packed(draw.filled(ControlMessage))
        if draw.chance(0.5):
            await self.nats.feed(subjects.CONTROL, payload, **draw.envelope())
        else:
            subject = subjects.control_to(BATCHER)
            await self.nats.feed(subjects.all_to(BATCHER), payload, subject, **draw.envelope())
        return "control"

    async def _step(self, draw: Mutator) -> str:
        report = draw.filled(worker_pb2.StepReport, 0.4)
        report.worker, report.ready, report.sequence = "w", True, self._sequence
        if draw.chance(0.8):
            report.load.slots, report.load.running, report.load.waiting = 8, 0, 0
        rows = list(self._loop.table.requests.values())[-4:]
        for row in rows if draw.chance(0.7) else ():
            frame = report.frames.add(request_id=row.request_id, attempt=row.attempt)
            frame.start_index = (len(row.produced) + draw.random.choice((0, 0, -1, 9))) % 2**32
            frame.token_ids.extend([draw.number(0, 2**32 - 1)] * draw.random.randint(0, 2))
            if draw.chance(0.3):
                frame.final.CopyFrom(draw.filled(frame_pb2.Final))
        try:
            found = step_report(_streamed(draw.packed(report)))
            if found is not None:
                self._loop.on_report(self._worker, found)
            self._sequence += 1
        except (ChannelBroken, MalformedMessage, WorkerRefused) as error:  # as `Worker` takes it
            self._loop.on_lost(self._worker)
            self._sequence = 0
            return type(error).__name__
        return "step"


def _streamed(payload: bytes) -> Any:
    infer = SimpleNamespace(raw_output_contents=[payload])
    return SimpleNamespace(error_message="", infer_response=infer)


class FuzzedWorker:
    """A worker with its threads and the echo engine."""

    def __init__(self) -> None:
        self._faults: list[str] = []
        engine = EchoEngine(slots=4, max_waiting=4, context_tokens=64, pause=_pause)
        fault = partial(self._faults.append, "the engine has ended")
        self._worker = Worker("small", engine, NoOpTracer(), on_fault=fault)
        self._worker.start()

    async def request(self, draw: Mutator) -> str:
        """A message of a batcher."""
        request = draw.filled(worker_pb2.WorkerRequest, 0.6)
        for row in request.batch.tasks:
            if draw.chance(0.7):
                row.task.priority_class, row.task.request_id = "bulk", draw.text() or "r"
                row.task.sampling.Clear()
                row.task.sampling.max_tokens, row.task.sampling.top_p = 3, 1.0
                row.task.sampling.repetition_penalty = 1.0
        if request.HasField("open_channel") and draw.chance(0.5):
            request.open_channel.batcher = BATCHER
        payload = draw.packed(request)
        try:
            self._worker.handle(unpack(worker_pb2.WorkerRequest, payload), _port())
        except (MalformedMessage, InboxFull) as error:
            return type(error).__name__
        finally:
            if self._faults:
                raise AssertionError(self._faults[0])
        return "taken"

    async def close(self) -> None:
        """Ends its threads."""
        await asyncio.to_thread(self._worker.stop)


def _port() -> Any:
    """Takes what a worker sends; it is not looked at."""
    port = Mock(is_cancelled=lambda: False)
    port.send = lambda report: report.SerializeToString()
    return port


def _pause() -> None:
    time.sleep(1e-4)


_JWT: Final = {"iss": "i", "aud": "a", "exp": 2e9, "nbf": 0, "tenant": "acme", "roles": ["caller"]}
_HEAD: Final = {"alg": "ES256", "kid": "k", "typ": "JWT"}


class Credentials:
    """Everything that says who calls."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec
        from jwt.algorithms import ECAlgorithm

        private = ec.generate_private_key(ec.SECP256R1())
        public = json.loads(ECAlgorithm.to_jwk(private.public_key()))
        self._private, self._jwks = private, {"keys": [{**public, "kid": "k", "use": "sig"}]}
        jwt = {"issuer": "i", "audience": "a", "jwks": "file"}
        settings = IdentitySettings.model_validate({"api_keys": True, "jwt": [jwt]})
        self._settings = settings.jwt[0]
        self._keys = key_set(self._jwks)
        self._authenticator = Authenticator(settings)
        self._key = new_key()

    async def credential(self, draw: Mutator) -> str:
        """A header, a token that its issuer has signed, a JWKS, or a key with the record of it."""
        kind = draw.random.choice((self._header, self._signed, self._jwks_of, self._record))
        try:
            await kind(draw)
        except (SluiceError, KeyMissing, MalformedMessage) as error:
            return type(error).__name__
        return "taken"

    async def _header(self, draw: Mutator) -> None:
        parts = (draw.changed_json(_HEAD), draw.changed_json(_JWT), draw.text())
        token = ".".join(base64.urlsafe_b64encode(draw.dumped(one)).decode() for one in parts)
        given = draw.random.choice((token, self._key.text, "slc_" + draw.text(), draw.text()))
        changed = draw.bytes(given.encode()).decode("latin-1")
        scheme = draw.random.choice(("Bearer ", "bearer ", "Basic ", ""))
        await self._authenticator.caller_of({"authorization": scheme + changed})

    async def _signed(self, draw: Mutator) -> None:
        import jwt

        head, claims = _HEAD, draw.dumped(draw.changed_json(_JWT))
        token = jwt.api_jws.encode(claims, self._private, "ES256", headers=head)
        caller_of_token(token, self._settings, self._keys, time.time())

    async def _jwks_of(self, draw: Mutator) -> None:
        with contextlib.suppress(ValueError):  # what `IssuerKeys` makes a typed error of
            key_set(draw.changed_json(self._jwks))

    async def _record(self, draw: Mutator) -> None:
        record = unpack(ApiKeyRecord, draw.packed(draw.filled(ApiKeyRecord)))
        caller_of_key(self._key.text, {self._key.id: record}, time.time())


async def stored(draw: Mutator) -> str:
    """A kept answer, as another release or a fault may have left it."""
    record = draw.filled(KeyRecord)
    try:
        found = unpack(KeyRecord, draw.packed(record))
        if is_whole(found):
            replay = Replay(found)
            held = replay.visible_ids[: draw.random.randint(0, 3)]
            if replay.matches(held, ""):
                reader = replay.join(len(held))
                replay.read(reader).SerializeToString()
    except (SluiceError, MalformedMessage) as error:
        return type(error).__name__
    return "taken"


_BATCH: Final = {
    "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
    "metadata": {"a": "b"},
}  # fmt: skip
_FORM: Final = (
    b'--xYz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xYz\r\n'
    b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{"a":1}\r\n--xYz--\r\n'
)


async def upload(draw: Mutator) -> str:
    """The form around a file of a job, and what a job is to do with it."""
    kind = draw.random.choice((_form, _batch, _job))
    try:
        kind(draw)
    except (SluiceError, BadField) as error:
        return type(error).__name__
    return "taken"


def _form(draw: Mutator) -> None:
    kind = draw.bytes(b"multipart/form-data; boundary=xYz") if draw.chance(0.2) else None
    form = FileForm((kind or b"multipart/form-data; boundary=xYz").decode("latin-1"))
    data = draw.bytes(_FORM)
    at = draw.random.randint(0, len(data))
    form.feed(data[:at])
    form.feed(data[at:])
    form.end()


def _batch(draw: Mutator) -> None:
    body = parse_json(draw.dumped(draw.changed_json(_BATCH)))
    headers = {"x-sluice-label-a": draw.text(), "idempotency-key": draw.text()}
    create_request(body, headers, 0).SerializeToString()
    page_limit(draw.text() if draw.chance(0.5) else "9" * draw.random.choice((1, 2, 5000)), 100)


def _job(draw: Mutator) -> None:
    with contextlib.suppress(MalformedMessage):
        check_stages(unpack(jobs_pb2.JobSpec, draw.packed(draw.filled(jobs_pb2.JobSpec))))


@asynccontextmanager
async def _opened(make: Callable[[], Any], method: str) -> AsyncIterator[Fuzzed]:
    """Yield a method of what `make` returns, which is started before and closed behind if it has such methods."""
    target = make()
    if hasattr(target, "start"):
        await target.start()
    try:
        yield getattr(target, method)
    finally:
        if hasattr(target, "close"):
            await target.close()


_FUNCTIONS: Final = SimpleNamespace(
    stored=stored,
    upload=upload,
    constraints=fuzz_inputs.constraints,
    tables=fuzz_inputs.tables,
    parquet=fuzz_inputs.parquet,
    audio=fuzz_inputs.audio,
    urls=fuzz_inputs.urls,
)
TARGETS: Final[Mapping[str, Callable[[], AbstractAsyncContextManager[Fuzzed]]]] = {
    **{
        kind: partial(_opened, fuzz_gateway.FuzzedGateway, kind)
        for kind in ("grpc", "http", "frames", "wire")
    },
    "batcher": partial(_opened, FuzzedBatcher, "message"),
    "worker": partial(_opened, FuzzedWorker, "request"),
    "credentials": partial(_opened, Credentials, "credential"),
    "jobs": partial(_opened, FuzzedJobs, "call"),
    "compiled": partial(_opened, fuzz_inputs.Compiled, "constraint"),
    **{name: partial(_opened, lambda: _FUNCTIONS, name) for name in vars(_FUNCTIONS)},
}
"""What is fuzzed, each opened anew from time to time."""
