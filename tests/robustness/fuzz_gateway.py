"""A whole gateway without sockets for fuzzing: calls over gRPC and HTTP, and messages on its subjects.

gRPC's server is replaced by one that keeps the handlers, NATS by `MemoryNats`. A batcher that answers tasks at once
is part of it; the rows that frames are fuzzed for are left to it.
"""

import asyncio
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2
from opentelemetry.trace import NoOpTracer

from gateway.admission.policies import Policies
from gateway.config.policies import load_all
from gateway.server import Gateway
from sluice.errors import InternalError, from_status
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.control_pb2 import BatcherReport, ModelReport
from sluice.internal.v1.gateway_pb2 import GatewayHeartbeat, GatewayQuery
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import parse
from sluice.telemetry.instruments import Instruments
from sluice.v1 import admin_pb2, inference_pb2, safety_pb2
from sluice.v1.admin_pb2 import ReadMetricsRequest
from sluice.v1.inference_pb2 import GenerateRequest
from sluice.wire import subjects
from tests.robustness.fuzz_nats import MemoryNats
from tests.robustness.mutator import Mutator

NAME: Final = "gw1"
BATCHER: Final = "b1"
MODELS: Final = ("small", "large")
CALL_S: Final = 5.0
"""Deadline of each call, seconds."""
REPORT_S: Final = 1.0
LIVE_MAX: Final = 6
"""Calls whose answers are fuzzed."""


class Untyped(Exception):
    """A call ended with an error that its caller can make nothing of."""


@cache
def parts() -> Policies:
    """What never changes, and takes long to load."""
    settings = parse(
        {
            "gateway": {"address": "127.0.0.1:0", "resume_key": "of the gateway that is fuzzed"},
            "http": {"address": "127.0.0.1:0"},
            "records": {"max_mib": 0, "audit_max_mib": 0},
            "nats": {"url": "nats://127.0.0.1:1"},
            "limits": {"requests_per_minute": 1e9, "tokens_per_minute": 1e9, "concurrent": 500},
            "routing": {"default": "small"},
            "safety": {"policies": {"default": {"actions": {"pii.*": "redact"}}}},
        },
        "fuzz",
    )
    return load_all(settings)


class _Server:
    """Stands for grpc.aio's server: keeps what it is given."""

    def __init__(self, interceptors: Sequence[Any] = (), **_: Any) -> None:
        self.interceptor = interceptors[0]
        self.handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": one for name, one in handlers.items()}

    def add_generic_rpc_handlers(self, _: Any) -> None:
        pass

    async def handler(self, method: str, metadata: Sequence[tuple[str, str]]) -> Any:
        """Of one call, as grpc.aio would ask for it, behind the interceptor."""

        async def continuation(_: Any) -> Any:
            return self.handlers[method]

        details: Any = SimpleNamespace(method=method, invocation_metadata=metadata)
        return await self.interceptor.intercept_service(continuation, details)


class Context:
    """Of one gRPC call: gives its messages, and keeps its status."""

    def __init__(self, metadata: Sequence[tuple[str, str]], payloads: Sequence[bytes] = ()) -> None:
        self._metadata, self._payloads = metadata, deque(payloads)
        self.outcome = "OK"

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def time_remaining(self) -> float:
        return CALL_S

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> Any:
        return self._payloads.popleft() if self._payloads else grpc.aio.EOF

    async def write(self, message: Message | bytes) -> None:
        if isinstance(message, Message):
            message.SerializeToString()

    async def abort(self, code: grpc.StatusCode, _: str, trailers: Sequence[Any] = ()) -> None:
        self.outcome = code.name
        details = dict(trailers).get("grpc-status-details-bin", b"")
        error = from_status(status_pb2.Status.FromString(details))
        if error is None or isinstance(error, InternalError):
            raise Untyped(f"{code.name}: {details!r}")
        raise grpc.aio.AbortError


class FuzzedGateway:
    """Attributes: kinds: the fuzzing functions by name; each returns what became of its input."""

    def __init__(self) -> None:
        policies = parts()
        self.nats: Any = MemoryNats()
        self.nats.published = self._published
        self._answers = True
        """Whether tasks are answered at once."""
        self._live: dict[str, Task] = {}
        self._calls: set[asyncio.Task[str]] = set()
        self._reported_at = 0.0
        servers: list[_Server] = []

        def new_server(**options: Any) -> _Server:
            servers.append(_Server(**options))
            return servers[-1]

        with patch("grpc.aio.server", new_server):
            self.gateway = Gateway(
                policies.settings,
                NAME,
                policies,
                NoOpTracer(),
                Instruments(),
                load_all,
            )
        self._server = servers[0]
        self._tokenizer = policies.catalog["small"].tokenizer.tokenizer
        self._methods: Sequence[str] = ()

    async def start(self) -> None:
        """Subscribes to everything."""
        gateway = self.gateway
        shared = gateway.shared
        answers = {
            "hand_over": shared.keys.hand_over,
            "clear_answers": shared.answers.forget,
            "dry_run": gateway._safety.answer_dry_run,
            **gateway._admin.answers,
        }
        await shared.peers.start(
            self.nats, answers, (gateway.reload, shared.usage), gateway.authenticator.refresh_keys
        )
        await gateway.exchange.start(self.nats)
        await gateway.transport.start(self.nats, gateway.shared.drains.on_report)
        gateway.shared.idempotency_keys.open(self.nats)
        await gateway.store.start(self.nats)
        self._methods = [one for one in self._server.handlers if _is_fuzzed(one)]

    async def close(self) -> None:
        """Ends what runs."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self.gateway.transport.close()
        await self.gateway.generator.admission.close()

    # Calls.

    async def grpc(self, draw: Mutator) -> str:
        """A call of any method."""
        method = draw.random.choice(self._methods)
        if draw.chance(0.5):
            method = "/sluice.v1.InferenceService/Generate"
        kind = _request_of(method)
        request = _prompt(draw) if kind is GenerateRequest else draw.filled(kind)
        payloads = [] if draw.chance(0.01) else [draw.packed(request)]
        return await self._called(method, payloads, _metadata(draw))

    async def http(self, draw: Mutator) -> str:
        """A call of any route."""
        path, body = draw.random.choice(_HTTP)
        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        headers += [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in _headers(draw)
        ]
        payload = draw.dumped(draw.changed_json(body))
        return await self._http_call(path, headers, payload)

    async def _called(
        self, method: str, payloads: Sequence[bytes], metadata: Sequence[tuple[str, str]]
    ) -> str:
        self._report()
        context = Context(metadata, payloads)
        handler = await self._server.handler(method, metadata)
        with suppress(grpc.aio.AbortError):
            # To gRPC every method reads a stream of messages, which the gateway parses.
            last = await (handler.stream_stream or handler.stream_unary)(None, context)
            if last is not None:
                await context.write(last)
        return context.outcome

    async def _http_call(
        self, path: str, headers: Sequence[tuple[bytes, bytes]], payload: bytes
    ) -> str:
        self._report()
        assert self.gateway.http is not None, "configured"
        app = self.gateway.http._server.config.app
        bodies = [{"type": "http.request", "body": payload, "more_body": False}]
        status = 0

        async def receive() -> Any:
            while not bodies:  # noqa: ASYNC110, nobody else calls it
                await asyncio.sleep(CALL_S)
            return bodies.pop()

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": headers, "root_path": "", "http_version": "1.1",
        }  # fmt: skip
        await app(scope, receive, send)  # type: ignore[operator, arg-type, call-arg]
        if status in (0, 500):
            raise Untyped(f"{path} ended with {status}")
        return str(status)

    # Messages.

    async def frames(self, draw: Mutator) -> str:
        """What a batcher says of rows that are live, or of others."""
        await self._open_calls()
        draw = Mutator(draw.random, (*self._live, BATCHER))
        bundle = frame_pb2.FrameBundle(batcher=BATCHER if draw.chance(0.9) else draw.text())
        for _ in range(draw.random.randint(0, 3)):
            if draw.chance(0.2) or not self._live:
                bundle.frames.append(draw.filled(frame_pb2.Frame))
            else:
                bundle.frames.append(self._frame(draw))
        if draw.chance(0.2):
            bundle.MergeFrom(draw.filled(frame_pb2.FrameBundle, 0.3))
        payload = bundle.SerializeToString() if draw.chance(0.8) else draw.packed(bundle)
        await self.nats.feed(subjects.frames(NAME), payload, **draw.envelope())
        return await self._ended()

    def _frame(self, draw: Mutator) -> frame_pb2.Frame:
        """One that its row may be waiting for."""
        task = self._live[draw.random.choice(tuple(self._live))]
        collector = self.gateway.registry.by_run.get(task.request_id)
        known = 0 if collector is None else collector.current.next_index
        tokens = [draw.random.randrange(50_000 if draw.chance(0.1) else 500) for _ in range(3)]
        frame = frame_pb2.Frame(
            request_id=task.request_id,
            attempt=task.attempt + draw.random.choice((0, 0, 0, 1, 1000)),
            start_index=max(0, known + draw.random.choice((0, 0, 0, 0, -1, 1, 5))),
            token_ids=tokens[: draw.random.randint(0, 3)],
        )
        if draw.chance(0.2):
            frame.final.CopyFrom(draw.filled(frame_pb2.Final))
        if draw.chance(0.1):
            frame.logprobs.append(draw.filled(frame_pb2.Logprobs))
        return frame

    async def wire(self, draw: Mutator) -> str:
        """What batchers, gateways and operators say on the other subjects."""
        kind, pattern, subject = draw.random.choice(_SUBJECTS)
        message = None if kind is None else draw.filled(kind)
        if isinstance(message, BatcherReport) and draw.chance(0.8):
            message.batcher = subject.rpartition(".")[2]
        payload = draw.random.randbytes(20) if message is None else draw.packed(message)
        await self.nats.feed(pattern, payload, subject, **draw.envelope())
        await asyncio.sleep(0)
        return await self._ended()

    async def _open_calls(self) -> None:
        """As many calls as are fuzzed, whose tasks are not answered."""
        self._answers = False
        self._report()
        method = "/sluice.v1.InferenceService/Generate"
        while len(self._calls) < LIVE_MAX:
            sampling = inference_pb2.SamplingParams(
                max_tokens=200, logprobs=len(self._calls) % 2, stop=["stop here"]
            )
            request = GenerateRequest(prompt="one two three", model="small", sampling=sampling)
            calling = self._called(method, [request.SerializeToString()], ())
            self._calls.add(asyncio.ensure_future(calling))
            for _ in range(8):
                await asyncio.sleep(0)

    async def _ended(self) -> str:
        """What became of calls that have ended; raises what is untyped."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done = {call for call in self._calls if call.done()}
        self._calls -= done
        for name in [one for one in self._live if one not in self.gateway.registry.by_run]:
            del self._live[name]
        ends = sorted(call.result() for call in done)
        return " ".join(ends) or "taken"

    # The batcher.

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < REPORT_S:
            return
        self._reported_at = now
        models = [ModelReport(model=name, workers=1, slots=64) for name in MODELS]
        report = BatcherReport(batcher=BATCHER, models=models, sequence=time.time_ns())
        self.gateway.transport.loads.update(report, now)
        self.gateway.registry.dispatch.restart(now)

    def _published(self, subject: str, payload: bytes) -> None:
        if not subject.endswith(".task"):
            return
        task = Task.FromString(payload)
        if self._answers:
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: loop.create_task(self._answer(task)))
        else:
            self._live[task.request_id] = task

    async def _answer(self, task: Task) -> None:
        final = frame_pb2.Final(end=frame_pb2.TASK_END_STOP)
        count = len(task.values.scored_token_ids) or 4
        if task.HasField("values"):
            final.values = struct.pack(f"<{count}f", *[0.5] * count)
        words = [] if task.HasField("values") else self._tokenizer.encode(" seven").ids
        frame = frame_pb2.Frame(
            request_id=task.request_id,
            attempt=task.attempt,
            start_index=len(task.produced_token_ids),
            token_ids=words,
            final=final,
        )
        bundle = frame_pb2.FrameBundle(batcher=BATCHER, frames=[frame])
        await self.nats.feed(subjects.frames(NAME), bundle.SerializeToString())


def _is_fuzzed(method: str) -> bool:
    """Those of ours with one request; the others hand bytes on, or are gRPC's own."""
    return method.startswith("/sluice.v1.") and "Job" not in method


@cache
def _request_of(method: str) -> type[Message]:
    service, _, name = method[1:].rpartition("/")
    for module in (inference_pb2, safety_pb2, admin_pb2):
        found = module.DESCRIPTOR.services_by_name.get(service.rpartition(".")[2])
        if found is not None:
            kind: type[Message] = getattr(module, found.methods_by_name[name].input_type.name)
            return kind
    raise AssertionError(f"no service has {method}")


def _prompt(draw: Mutator) -> GenerateRequest:
    """A request that is likely to be valid in most of its fields."""
    request = draw.filled(GenerateRequest, draw.random.choice((0.1, 0.2, 0.5)))
    if draw.chance(0.8):
        request.model = draw.random.choice(("", "auto", *MODELS))
        request.prompt = draw.text() + draw.text()
        request.ClearField("resume")
        request.priority = inference_pb2.PRIORITY_INTERACTIVE
    if draw.chance(0.7):
        request.sampling.Clear()
        request.sampling.max_tokens = draw.random.choice((1, 2, 50))
    return request


def _metadata(draw: Mutator) -> list[tuple[str, str]]:
    names = ("sluice-tenant", "traceparent", "tracestate", "authorization", "x")
    ascii_only = (
        (name, draw.text().encode("ascii", "ignore").decode()) for name in names if draw.chance(0.1)
    )
    return list(ascii_only)


def _headers(draw: Mutator) -> list[tuple[str, str]]:
    names = ("sluice-tenant", "x-sluice-priority", "x-sluice-timeout", "idempotency-key")
    more = ("x-sluice-label-task", "x-sluice-other", "content-length", "traceparent")
    return [(name, draw.text()) for name in (*names, *more) if draw.chance(0.08)]


_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
_CHAT: Final[dict[str, Any]] = {
    "model": "small",
    "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "hi"}],
    "max_tokens": 2,
    "temperature": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_object"},
    "tools": [_TOOL],
    "tool_choice": "auto",
    "logit_bias": {"5": 1},
    "n": 1,
    "user": "u",
}
_HTTP: Final[Sequence[tuple[str, dict[str, Any]]]] = (
    ("/v1/chat/completions", _CHAT),
    (
        "/v1/chat/completions",
        {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ),
    ("/v1/completions", {"model": "large", "prompt": "a b", "max_tokens": 2, "echo": False}),
    (
        "/v1/responses",
        {
            "model": "small",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            "max_output_tokens": 3,
            "instructions": "b",
            "stream": False,
        },
    ),
    ("/v1/embeddings", {"model": "small", "input": ["a", "b"], "encoding_format": "base64"}),
    ("/v1/rerank", {"model": "small", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
)
_SUBJECTS: Final[Sequence[tuple[type[Message] | None, str, str]]] = (
    (BatcherReport, subjects.ALL_REPORTS, subjects.report(BATCHER)),
    (BatcherReport, subjects.ALL_REPORTS, subjects.report("b2")),
    (GatewayHeartbeat, subjects.GATEWAYS, subjects.GATEWAYS),
    (GatewayQuery, subjects.gateway(NAME), subjects.gateway(NAME)),
    (ReadMetricsRequest, subjects.METRICS, subjects.METRICS),
    (None, subjects.absent(NAME, subjects.ANY), subjects.absent(NAME, BATCHER)),
)
